// SPDX-License-Identifier: Apache-2.0
// decode_attention: softmax attention of a few queries per sequence over a paged cache.
//
// Lower bound: keys and values are read once, 2 * Hk * D * (1 or 2) bytes per key, at 20 bytes per
// clock and multiprocessor at an H200's full bandwidth. That needs about 40 KiB in flight on each
// at any time. Short problems are bound by the latency of dependent reads instead: lengths, page
// table, keys, then the results that the splits exchange.
//
// Plan: each warp works independently. It has a ring of two or three stages in shared memory, each
// a step of keys and of values (4 KiB each: 16 keys of D = 128 in 16 bits). It refills a stage by
// cp.async as soon as it was read, so that up to 16 KiB per warp, 128 KiB per multiprocessor, are
// in flight. (Registers cannot hold as much in flight: the compiler moves loads, and waits for
// them.) All page sizes cost the same, because each row's address comes from its own page table
// entry. Tensor cores multiply fragments of a stage (warp.cuh): 16 keys x 8 query rows, where the
// rows are the query heads of a key head times the queries. float8 is converted in registers, 2
// values per instruction.
//
// A tile is 8, 16 or 32 query rows of one key head. choose.cc chooses between two ways to share
// tiles:
// - clustered, for short sequences: a cluster of 1 to 8 blocks has one tile; their warps take its
//   steps in turn, and the blocks add their sums through distributed shared memory. One launch, no
//   workspace; the first page table entries are read beside the lengths.
// - spread: all resident blocks get equal shares of all steps of all tiles, whatever the lengths;
//   each block computes its share from the lengths. Partial results of a shared tile go to a
//   workspace, and the last block to arrive combines them (parts.cuh). For tiles of more than 8
//   rows, or with more blocks per tile than one block can combine in time, decode_combine does.
//   Tiles of 32 rows are always spread: their sums take half of a thread's registers.
#ifndef KERNELS_ATTENTION_DECODE_KERNEL_CUH_
#define KERNELS_ATTENTION_DECODE_KERNEL_CUH_

#include <cstdint>

#include "kernels/attention/decode/parts.cuh"
#include "kernels/attention/decode/warp.cuh"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/early_launch.h"

namespace tiercel {

template <typename Shape>
struct DecodeShared {
  static constexpr int kPitch = Shape::kD + 4;
  // A warp's stages; after all of them are read, its sums.
  union Ring {
    alignas(128) unsigned char stages[Shape::kStages][Shape::kStage];
    float out[Shape::kRows][kPitch];
  };
  Ring rings[Shape::kWarps];
  ShareCursor cursor;
  bool last;  // this block is the last to arrive of those that share the tile
  int64_t scratch[Shape::kWarps];
  float largest[Shape::kWarps][Shape::kRows];
  float sum[Shape::kWarps][Shape::kRows];
  alignas(16) uint32_t queries[Shape::kTiles * Shape::kFragments * 32][4];
  float query_sizes[Shape::kFragments][Shape::kRows];
  TreeRow tree[Shape::kRows];
  // From each block of a cluster: its sums of the vectors that this block stores, and of all rows.
  float4 inbox[kDecodeMaxCluster][Shape::kRows * Shape::kD / 4 / kDecodeMaxCluster];
  float2 inbox_sums[kDecodeMaxCluster][Shape::kRows];
};

// The steps of one warp.
struct Steps {
  int first, stride, last;
};

// threadIdx.x; values derived from it are computed again for each tile, since they would occupy
// registers that the keys need.
__device__ __forceinline__ int this_thread() {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread;
}

// The tile's queries in the order of the fragments. float8 caches are multiplied in float16, whose
// range is less than bfloat16's: each row is then scaled to a largest magnitude between 1 and 2.
template <typename Shape>
struct QueryLoader {
  using Format = typename Shape::Format;
  static constexpr bool kScaled = Shape::kFloat8 && !std::is_same_v<Format, Float16>;
  static constexpr int kWords = Shape::kTiles * Shape::kFragments * 32;
  static constexpr int kEach = (kWords + Shape::kThreads - 1) / Shape::kThreads;

  uint32_t words[kEach][4];

  static __device__ __forceinline__ int row(int word) {
    return word / 32 / Shape::kFragments * 8 + word % 32 / 4;
  }

  __device__ __forceinline__ void load(const DecodeArgs& args, const Tile& tile,
                                       const QueryRows& rows) {
    const int thread = this_thread();
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int word = e * Shape::kThreads + thread;
      const int d = word / 32 % Shape::kFragments * 32 + 8 * (word % 4);
      const int r = tile.row_block * Shape::kRows + row(word);
#pragma unroll
      for (int i = 0; i < 4; ++i) words[e][i] = 0;
      if (word < kWords && r < rows.count * args.group && d < args.d) {
        load_vector(words[e], args.q + tile.b * args.q_strides[0] +
                                  (rows.first + r / args.group) * args.q_strides[1] +
                                  (tile.head * args.group + r % args.group) * args.q_strides[2] +
                                  d * 2);
      }
    }
  }

  // Ends with a barrier.
  __device__ __forceinline__ void store(DecodeShared<Shape>* shared) {
    const int thread = this_thread();
    if constexpr (kScaled) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int word = e * Shape::kThreads + thread;
        float values[8], size = 0.0f;
        unpack<Format, 4>(words[e], values);
#pragma unroll
        for (int i = 0; i < 8; ++i) size = fmaxf(size, fabsf(values[i]));
        size = lanes_reduce<4>(size, Max());
        if (word < kWords && word % 4 == 0) {
          shared->query_sizes[word / 32 % Shape::kFragments][row(word)] = size;
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int word = e * Shape::kThreads + thread;
      if (word >= kWords) continue;
      if constexpr (kScaled) {
        float values[8];
        unpack<Format, 4>(words[e], values);
        const float down = 1.0f / unit(*shared, row(word));
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] *= down;
        pack<Float16, 4>(values, words[e]);
      }
      // To the lanes and words of the products' operands.
      const int t = word % 4;
      uint32_t (*fragment)[4] = &shared->queries[word - t];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Shape::kFloat8) {
          fragment[2 * (t % 2) + i / 2][2 * (t / 2) + i % 2] = words[e][i];
        } else {
          fragment[i][t] = words[e][i];
        }
      }
    }
    __syncthreads();
  }

  // The power of 2 that a row was divided by.
  static __device__ __forceinline__ float unit(const DecodeShared<Shape>& shared, int row) {
    if constexpr (!kScaled) return 1.0f;
    float size = 0.0f;
#pragma unroll
    for (int f = 0; f < Shape::kFragments; ++f) size = fmaxf(size, shared.query_sizes[f][row]);
    const uint32_t exponent = __float_as_uint(size) >> 23;
    // Neither it nor its inverse may leave the range of float32.
    return exponent == 0 ? 1.0f : __uint_as_float(min(exponent, 253u) << 23);
  }
};

// The keys that a tile's rows see with a tree.
template <typename Shape>
__device__ __forceinline__ void load_tree(const DecodeArgs& args, const Tile& tile,
                                          const Sequence<Shape::kStep>& sequence,
                                          DecodeShared<Shape>* shared) {
  const int row = this_thread();
  if (row >= Shape::kRows) return;
  const int start = start_of(args, tile.b), count = sequence.queries, old = sequence.length - count;
  const int query = (tile.row_block * Shape::kRows + row) / args.group;
  uint64_t word = 0;
  if (query < count) {
    word =
        *reinterpret_cast<const uint64_t*>(reinterpret_cast<const char*>(args.tree) +
                                           static_cast<int64_t>(args.tree_step) * (start + query));
  }
  shared->tree[row] = tree_row(word, count, old, args.left);
}

template <typename Shape>
__device__ __forceinline__ void set_rows(const DecodeArgs& args, const Tile& tile,
                                         const Sequence<Shape::kStep>& sequence,
                                         const DecodeShared<Shape>& shared, Rows<Shape>* rows) {
  const int t = this_thread() % 4;
  const float key_scale = scale_of(args.k_scale, args.k_scale_per_head, tile.head);
#pragma unroll
  for (int r = 0; r < 2 * Shape::kTiles; ++r) {
    const int row = r / 2 * 8 + 2 * t + r % 2;
    const int query = min(tile.row_block * Shape::kRows + row, args.rows - 1) / args.group;
    rows->own[r] = sequence.length - sequence.queries + query;
    rows->scale[r] = args.scale;
    if constexpr (Shape::kFloat8) {
      rows->scale[r] *= key_scale * QueryLoader<Shape>::unit(shared, row);
    }
  }
}

// One vector of 8 results of a row, from parts that are relative to different largest scores.
struct Sums {
  float largest = -INFINITY, sum = 0.0f;
  float out[8] = {};
};

template <typename Shape>
__device__ __forceinline__ void store_result(const DecodeArgs& args, const Tile& tile, int row,
                                             int d, const Sums& sums) {
  const int r = tile.row_block * Shape::kRows + row;
  const QueryRows rows = query_rows(args, tile.b);
  if (r >= rows.count * args.group || d >= args.d) return;
  const int query = rows.first + r / args.group, head = tile.head * args.group + r % args.group;
  const Total total = total_of(args, tile, head, sums.largest, sums.sum);
  float values[8];
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = sums.out[i] * total.factor;
  pack<typename Shape::Format, 4>(values, words);
  store_vector(args.out + tile.b * args.out_strides[0] + query * args.out_strides[1] +
                   head * args.out_strides[2] + d * 2,
               words);
  if (d == 0) store_log(args, tile, query, head, total);
}

// Writes the warps' results to shared memory. Ends with a barrier.
template <typename Shape>
__device__ __forceinline__ void join_warps(const WarpState<Shape>& state,
                                           DecodeShared<Shape>* shared) {
  const int thread = this_thread(), warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
#pragma unroll
  for (int r = 0; r < 2 * Shape::kTiles; ++r) {
    const int row = r / 2 * 8 + 2 * t + r % 2;
    float sum = state.sum[r];
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    if (g == 0) {
      shared->largest[warp][row] = state.largest[r];
      shared->sum[warp][row] = sum;
    }
    float* out = shared->rings[warp].out[row];
#pragma unroll
    for (int m = 0; m < Shape::kD / 16; ++m) {
      const float first = state.out[r / 2][m][r % 2], second = state.out[r / 2][m][r % 2 + 2];
      if constexpr (Shape::kFloat8) {
        *reinterpret_cast<float2*>(out + 16 * m + 2 * g) = make_float2(first, second);
      } else {
        out[16 * m + g] = first;
        out[16 * m + 8 + g] = second;
      }
    }
  }
  __syncthreads();
}

// Combines the warps' parts, then the cluster's, or leaves the block's part in the workspace.
template <typename Shape>
__device__ __forceinline__ void finish(const DecodeArgs& args, const Tile& tile, int64_t slot,
                                       uint32_t blocks, DecodeShared<Shape>* shared) {
  constexpr int kOfRow = Shape::kD / 8;
  constexpr int kVectors = Shape::kRows * kOfRow;
  for (int vector = this_thread(); vector < kVectors; vector += Shape::kThreads) {
    const int row = vector / kOfRow, d = vector % kOfRow * 8;
    Sums sums;
#pragma unroll
    for (int w = 0; w < Shape::kWarps; ++w)
      sums.largest = fmaxf(sums.largest, shared->largest[w][row]);
#pragma unroll
    for (int w = 0; w < Shape::kWarps; ++w) {
      const float own = shared->largest[w][row];
      const float factor = own == -INFINITY ? 0.0f : exp2_approx(own - sums.largest);
      sums.sum += shared->sum[w][row] * factor;
#pragma unroll
      for (int i = 0; i < 8; ++i) sums.out[i] += shared->rings[w].out[row][d + i] * factor;
    }
    if (blocks == 1 && slot == kWhole) {
      store_result<Shape>(args, tile, row, d, sums);
      continue;
    }
    const float4 low = make_float4(sums.out[0], sums.out[1], sums.out[2], sums.out[3]);
    const float4 high = make_float4(sums.out[4], sums.out[5], sums.out[6], sums.out[7]);
    const float2 both = make_float2(sums.largest, sums.sum);
    if (slot != kWhole) {
      float4* to = reinterpret_cast<float4*>(args.partial) + (slot * kVectors + vector) * 2;
      to[0] = low, to[1] = high;
      if (d == 0) args.partial_sums[slot * Shape::kRows + row] = both;
    } else {
      // A vector is stored by the block whose turn it is.
      const uint32_t owner = vector % blocks, own = cluster_rank();
      float4* to = &shared->inbox[own * (kDecodeMaxCluster / blocks)][vector / blocks * 2];
      store_remote(to, owner, low);
      store_remote(to + 1, owner, high);
      store_remote(&shared->inbox_sums[own][row], owner, both);
    }
  }
  if (blocks == 1) return;

  cluster_arrive();
  cluster_wait();
  for (int vector = this_thread() * blocks + cluster_rank(); vector < kVectors;
       vector += Shape::kThreads * blocks) {
    const int row = vector / kOfRow, d = vector % kOfRow * 8;
    Sums sums;
    for (uint32_t from = 0; from < blocks; ++from) {
      sums.largest = fmaxf(sums.largest, shared->inbox_sums[from][row].x);
    }
    for (uint32_t from = 0; from < blocks; ++from) {
      const float2 both = shared->inbox_sums[from][row];
      const float factor = both.x == -INFINITY ? 0.0f : exp2_approx(both.x - sums.largest);
      sums.sum += both.y * factor;
      const float4* parts =
          &shared->inbox[from * (kDecodeMaxCluster / blocks)][vector / blocks * 2];
      const float4 low = parts[0], high = parts[1];
      sums.out[0] += low.x * factor, sums.out[1] += low.y * factor;
      sums.out[2] += low.z * factor, sums.out[3] += low.w * factor;
      sums.out[4] += high.x * factor, sums.out[5] += high.y * factor;
      sums.out[6] += high.z * factor, sums.out[7] += high.w * factor;
    }
    store_result<Shape>(args, tile, row, d, sums);
  }
}

// Combines a shared tile if this block is the last to arrive. Call it after a barrier.
template <typename Shape>
__device__ __forceinline__ void put_parts_together(const DecodeArgs& args,
                                                   DecodeShared<Shape>* shared) {
  const int thread = this_thread();
  const ShareCursor cursor = shared->cursor;  // a copy: it advances while some threads are here
  if (thread < 32) {
    const bool last =
        arrive_last(args.arrived, 1, cursor.slot, cursor.first_block, args.columns, cursor.parts);
    if (thread == 0) shared->last = last;
  }
  __syncthreads();
  if (!shared->last) return;
  constexpr int kOfRow = Shape::kD / 4;
  constexpr int kAtOnce = 16;
  const Tile tile = cursor.tile;
  const int rows = min(Shape::kRows, args.rows - tile.row_block * Shape::kRows);
#pragma unroll 1
  for (int vector = thread; vector < rows * kOfRow; vector += Shape::kThreads) {
    const int row = vector / kOfRow, d = vector % kOfRow * 4;
    Part part;
#pragma unroll 1
    for (int first = 0; first < cursor.parts; first += kAtOnce) {
      float2 sums[kAtOnce];
      float4 out[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        sums[i] = make_float2(-INFINITY, 0.0f);
        out[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + i >= cursor.parts) continue;
        const int64_t slot = part_slot(cursor.first_block, args.columns, first + i);
        const int64_t line = slot * Shape::kRows + row;
        sums[i] = __ldcg(args.partial_sums + line);
        out[i] = __ldcg(reinterpret_cast<const float4*>(args.partial + line * Shape::kD + d));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) part.add(sums[i], out[i]);
    }
    store_part<typename Shape::Format>(args, tile, tile.row_block * Shape::kRows + row, d, part);
  }
}

__device__ __forceinline__ const int32_t* table_of(const DecodeArgs& args, int b) {
  return reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(args.page_table) +
                                          b * args.table_stride);
}

// The page table's entries of the steps that a warp copies next.
template <typename Shape>
struct NextPages {
  Pages<Shape> of[Shape::kStages];

  __device__ __forceinline__ void shift() {
#pragma unroll
    for (int i = 1; i < Shape::kStages; ++i) of[i - 1] = of[i];
  }
};

// A warp's steps of a tile. `next` are those of the first ones.
template <typename Shape>
__device__ __forceinline__ void attend(const DecodeArgs& args, const Tile& tile,
                                       const Sequence<Shape::kStep>& sequence, const Steps& steps,
                                       QueryLoader<Shape>* queries, NextPages<Shape> next,
                                       bool clears, DecodeShared<Shape>* shared,
                                       WarpState<Shape>* state) {
  constexpr int kStages = Shape::kStages;
  const int32_t* table = table_of(args, tile.b);
  const char* k = args.k + tile.head * args.k_strides.head;
  const char* v = args.v + tile.head * args.v_strides.head;
  const uint32_t ring =
      static_cast<uint32_t>(__cvta_generic_to_shared(shared->rings[this_thread() / 32].stages));
  const auto copy = [&](int step, uint32_t stage) {
    if (step < steps.last) {
      const int key = sequence.first_key(step);
      copy_step<Shape>(args, k, v, next.of[0], key, sequence.length - 1 - key, stage);
    }
    async_copy_commit();
    next.shift();
  };
#pragma unroll 1  // half the code
  for (int i = 0; i < kStages; ++i) copy(steps.first + i * steps.stride, ring + i * Shape::kStage);
  const auto load_pages = [&](int i, int step) {
    if (step < steps.last) next.of[i].load(args, table, sequence.first_key(step));
  };
#pragma unroll
  for (int i = 0; i < kStages; ++i) load_pages(i, steps.first + (kStages + i) * steps.stride);
  // While the copies are under way; `store` ends with a barrier.
  if (clears) clear_other_rows<Shape::kThreads>(args);
  if (args.tree != nullptr) load_tree<Shape>(args, tile, sequence, shared);
  queries->store(shared);
  Rows<Shape> rows;
  set_rows(args, tile, sequence, *shared, &rows);
  state->clear();
  uint32_t stage = ring;
  for (int at = steps.first; at < steps.last; at += steps.stride) {
    async_copy_wait<kStages - 1>();
    __syncwarp();
    float s[Shape::kTiles][Shape::kBlocks][4];
    scores<Shape>(stage, reinterpret_cast<const uint4*>(shared->queries), s);
    softmax<Shape>(args, rows, sequence, sequence.first_key(at), shared->tree, s, state);
    sums<Shape>(stage + Shape::kHalf, s, state);
    __syncwarp();  // the stage was read
    copy(at + kStages * steps.stride, stage);
    load_pages(kStages - 1, at + 2 * kStages * steps.stride);
    stage += Shape::kStage;
    if (stage == ring + kStages * Shape::kStage) stage = ring;
  }
}

template <typename Shape, int kResidents>
__global__ void __launch_bounds__(Shape::kThreads, kResidents)
    decode_attention(const __grid_constant__ DecodeArgs args) {
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  DecodeShared<Shape>& shared = *reinterpret_cast<DecodeShared<Shape>*>(dynamic_shared);
  ShareCursor& cursor = shared.cursor;
  grid_dependency_wait_and_launch(args.early_launch);

  bool others = args.starts != nullptr;  // to be cleared
  const uint32_t blocks = Shape::kSpread ? 1 : cluster_blocks();
  if (blocks > 1) cluster_arrive_relaxed();
  const int turn = (blocks > 1 ? cluster_rank() : 0) * Shape::kWarps + threadIdx.x / 32;
  Tile tile;
  if constexpr (Shape::kSpread) {
    const int second = static_cast<int>(blockIdx.x) - args.columns;
    const bool clears = args.tiles != nullptr && !args.by_tile && second >= 0;
    if (threadIdx.x == 0 && clears) args.tiles[second].w = 0;
    start_share<Shape::kStep, Shape::kThreads>(args, shared.scratch, &cursor);
    if (cursor.at >= cursor.end) {
      if (others) clear_other_rows<Shape::kThreads>(args);
      return;
    }
  } else {
    const int index = blockIdx.x / blocks, heads = index / args.row_blocks;
    // Row blocks first: they read the same keys.
    tile = {heads / args.kv_heads, heads % args.kv_heads, index % args.row_blocks};
  }
  do {
    Steps steps{turn, static_cast<int>(blocks) * Shape::kWarps, 0x7fffffff};
    if constexpr (Shape::kSpread) {
      if (threadIdx.x == 0) {
        enter_tile<Shape::kStep>(args, &cursor);
        if (args.tiles != nullptr) list_tile(args, cursor);
      }
      __syncthreads();
      tile = cursor.tile;
      steps.first += cursor.first;
      steps.last = cursor.last;
    }
    // Without a window the first keys are known: their page table entries are read before the
    // length arrives.
    NextPages<Shape> next;
    const int32_t* table = table_of(args, tile.b);
    const bool ahead = args.left < 0;
    if (ahead) {
#pragma unroll
      for (int i = 0; i < Shape::kStages; ++i) {
        next.of[i].load(args, table, (steps.first + i * steps.stride) * Shape::kStep);
      }
    }
    const int length = load_strided(args.lengths, args.length_step, tile.b);
    const int prefix =
        args.prefixes == nullptr ? 0 : load_strided(args.prefixes, args.prefix_step, tile.b);
    const QueryRows rows = query_rows(args, tile.b);
    QueryLoader<Shape> queries;
    queries.load(args, tile, rows);
    const Sequence<Shape::kStep> sequence(args, length, prefix, rows.count);
    steps.last = min(steps.last, sequence.steps);
    if (!ahead) {
#pragma unroll
      for (int i = 0; i < Shape::kStages; ++i) {
        next.of[i].load(args, table, sequence.first_key(steps.first + i * steps.stride));
      }
    }
    WarpState<Shape> state;
    attend<Shape>(args, tile, sequence, steps, &queries, next, others, &shared, &state);
    others = false;
    join_warps<Shape>(state, &shared);
    if (blocks > 1) cluster_wait();  // all blocks run, so their inboxes exist
    if constexpr (Shape::kSpread) {
      const int64_t slot = cursor.slot;
      finish<Shape>(args, cursor.tile, slot, 1, &shared);
      __syncthreads();  // the shared memory was read
      if constexpr (Shape::kRows <= kDecodeMostRows) {
        if (slot != kWhole && args.tiles == nullptr) put_parts_together<Shape>(args, &shared);
      }
      if (threadIdx.x == 0) leave_tile(args, &cursor);
      __syncthreads();
    } else {
      finish<Shape>(args, tile, kWhole, blocks, &shared);
      return;
    }
  } while (cursor.at < cursor.end);
}

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_DECODE_KERNEL_CUH_
