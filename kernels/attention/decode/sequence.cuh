// SPDX-License-Identifier: Apache-2.0
// The keys that a sequence's queries see, in steps of kStep keys, and each block's share of them.
#ifndef KERNELS_ATTENTION_DECODE_SEQUENCE_CUH_
#define KERNELS_ATTENTION_DECODE_SEQUENCE_CUH_

#include <cstdint>

#include "kernels/attention/decode/kernels.h"
#include "kernels/attention/decode/query_rows.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

// Steps without a visible key are skipped: those before the window and outside the prefix.
template <int kStep>
struct Sequence {
  int length;
  int queries;
  int prefix;      // keys that every query sees
  int head_steps;  // those of the prefix that lie before the window
  int skipped;     // steps before the window
  int steps;

  __device__ __forceinline__ Sequence(const DecodeArgs& args, int b)
      : Sequence(args, load_strided(args.lengths, args.length_step, b),
                 args.prefixes == nullptr ? 0 : load_strided(args.prefixes, args.prefix_step, b),
                 query_rows(args, b).count) {}

  __device__ __forceinline__ Sequence(const DecodeArgs& args, int given_length, int given_prefix,
                                      int given_queries) {
    length = min(max(given_length, 0), args.capacity);
    queries = given_queries;
    prefix = min(given_prefix, length);
    skipped = args.left < 0 ? 0 : max(length - queries - args.left, 0) / kStep;
    head_steps = prefix > 0 ? min((prefix + kStep - 1) / kStep, skipped) : 0;
    steps = queries == 0 ? 0 : (length + kStep - 1) / kStep - skipped + head_steps;
  }

  __device__ __forceinline__ int first_key(int step) const {
    return (step < head_steps ? step : step - head_steps + skipped) * kStep;
  }
  // True if all keys of the step are in every query's window and before its end, and with a tree
  // before the new tokens.
  __device__ __forceinline__ bool all_see(const DecodeArgs& args, int key) const {
    const int end = length - 1, last = key + kStep - 1;
    return last <= end && (args.tree == nullptr || last < length - queries) &&
           (args.right < 0 || last <= end + 1 - queries + args.right) &&
           (args.left < 0 || key >= end - args.left);
  }
  // An empty sequence takes one step: its results have to be written.
  __device__ __forceinline__ int cost() const { return max(steps, 1); }
};

struct Tile {
  int b, head, row_block;  // head of the keys
};

// The destination of a tile's results.
constexpr int64_t kWhole = -1;  // out; other values are places of the workspace

// A block's share of the steps of all tiles. The tiles of a sequence are dealt to columns of
// blocks. A column's steps, in the order of sequences and tiles, are divided evenly among its
// blocks. So a group of blocks, one of each column, goes through the same keys together, and the
// heads of a key, which are neighbours in memory, are read at the same time. A tile may be in one
// block, or shared by several of the column. The cursor is in shared memory; thread 0 advances it.
struct ShareCursor {
  int64_t at;  // among all steps
  int64_t end;
  int64_t each;  // steps per block
  int group;
  Tile tile;        // where it is now
  int first;        // step of the tile
  int last;         // after the share's last
  int64_t slot;     // kWhole or a place in the workspace
  int first_block;  // of those that share the tile, when they do
  int parts;
};

template <int kStep>
__device__ __forceinline__ void enter_tile(const DecodeArgs& args, ShareCursor* cursor) {
  const int steps = Sequence<kStep>(args, cursor->tile.b).cost();
  const int64_t begin = cursor->at - cursor->first, end = begin + steps;
  const bool later = cursor->first > 0;  // another block has its beginning
  cursor->last = static_cast<int>(min(end, cursor->end) - begin);
  cursor->slot = kWhole;
  if (!later && end <= cursor->end) return;
  const int block = static_cast<int>(blockIdx.x);
  const int group = static_cast<int>(begin / cursor->each);
  cursor->slot = 2 * static_cast<int64_t>(block) + !later;
  cursor->parts = static_cast<int>((end - 1) / cursor->each) - group + 1;
  cursor->first_block = block - (cursor->group - group) * args.columns;
}

// Tells decode_combine of a tile: its second block does, and by tile that of a whole one.
__device__ __forceinline__ void list_tile(const DecodeArgs& args, const ShareCursor& cursor) {
  const Tile& tile = cursor.tile;
  const int number = tile.head * args.row_blocks + tile.row_block;
  const int before = static_cast<int>(blockIdx.x) - args.columns;
  int4* work = args.tiles + (args.by_tile ? tile.b * args.sequence_tiles + number : before);
  if (cursor.slot != kWhole && cursor.first_block == before) {
    *work = make_int4(tile.b, number, before, cursor.parts);
  } else if (args.by_tile && cursor.slot == kWhole) {
    work->w = 0;
  }
}

// `number` counts the tiles of a sequence.
__device__ __forceinline__ Tile tile_of(const DecodeArgs& args, int b, int number) {
  return {b, number / args.row_blocks, number % args.row_blocks};
}

__device__ __forceinline__ void leave_tile(const DecodeArgs& args, ShareCursor* cursor) {
  cursor->at += cursor->last - cursor->first;
  cursor->first = 0;
  const Tile& tile = cursor->tile;
  const int next = tile.head * args.row_blocks + tile.row_block + args.columns;
  const bool same = next < args.sequence_tiles;
  cursor->tile = tile_of(args, tile.b + !same, same ? next : blockIdx.x % args.columns);
}

// Every thread calls it; `scratch` has an element for each warp. Ends with a barrier.
template <int kStep, int kThreads>
__device__ __forceinline__ void start_share(const DecodeArgs& args, int64_t* scratch,
                                            ShareCursor* cursor) {
  const int tiles = args.sequence_tiles / args.columns;  // of a sequence and column
  const int each = (args.batch + kThreads - 1) / kThreads;
  const int first = threadIdx.x * each, last = min(first + each, args.batch);
  int64_t mine = 0;
#pragma unroll 1
  for (int b = first; b < last; ++b) mine += Sequence<kStep>(args, b).cost();
  mine *= tiles;
  int64_t before = mine;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int64_t other = __shfl_up_sync(kFullWarp, before, offset);
    if (static_cast<int>(threadIdx.x % 32) >= offset) before += other;
  }
  if (threadIdx.x % 32 == 31) scratch[threadIdx.x / 32] = before;
  before -= mine;
  __syncthreads();
  int64_t total = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    if (warp == static_cast<int>(threadIdx.x / 32)) before += total;
    total += scratch[warp];
  }
  const int64_t groups = gridDim.x / args.columns, share = (total + groups - 1) / groups;
  const int group = blockIdx.x / args.columns;
  const int64_t begin = min(share * group, total);
  if (threadIdx.x == 0) {
    cursor->at = begin;
    cursor->end = min(begin + share, total);
    cursor->each = share;
    cursor->group = group;
  }
  if (before <= begin && begin < before + mine) {
    int64_t position = begin - before;
    int b = first, steps = 1;
#pragma unroll 1
    for (; b < last; ++b) {
      steps = Sequence<kStep>(args, b).cost();
      if (position < static_cast<int64_t>(steps) * tiles) break;
      position -= static_cast<int64_t>(steps) * tiles;
    }
    const int index = static_cast<int>(position / steps);
    cursor->tile = tile_of(args, b, index * args.columns + blockIdx.x % args.columns);
    cursor->first = static_cast<int>(position % steps);
  }
  __syncthreads();
}

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_DECODE_SEQUENCE_CUH_
