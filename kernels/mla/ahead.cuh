// SPDX-License-Identifier: Apache-2.0
// A block of mla_decode_ahead: its shared memory, its barriers, and what loads.
#ifndef KERNELS_MLA_AHEAD_CUH_
#define KERNELS_MLA_AHEAD_CUH_

#include <cstdint>

#include "kernels/mla/block.cuh"
#include "kernels/mla/load.cuh"
#include "kernels/mla/mla_kernels.h"
#include "kernels/mla/share.cuh"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/prefetch.h"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/tma.cuh"

namespace tiercel {

// A step is loaded and multiplied in three parts: the first half of the values, the rotary columns,
// the other half. Its first block of 64 columns, and how many it has.
constexpr __device__ __forceinline__ int part_block(int part) {
  return part == 0 ? 0 : part == 1 ? kMlaBlocks - 1 : kHalfBlocks;
}

constexpr __device__ __forceinline__ int part_blocks(int part) {
  return part == 1 ? 1 : kHalfBlocks;
}

struct AheadMemory {
  uint32_t base;

  __device__ __forceinline__ uint32_t tile(int stage) const { return base + stage * kMlaTile; }
  // Probabilities of the same size take the place of the keys' rotary columns.
  __device__ __forceinline__ uint32_t rotary(int stage) const {
    return tile(stage) + (kMlaBlocks - 1) * kMlaBlock;
  }
  // Barriers of a stage: a part is there; a half is free; probabilities are there; values may be
  // multiplied.
  __device__ __forceinline__ uint32_t full(int part, int stage) const {
    return base + kAheadBarriers + (stage * (kAheadParts + 4) + part) * 8;
  }
  __device__ __forceinline__ uint32_t empty(int half, int stage) const {
    return full(kAheadParts + half, stage);
  }
  __device__ __forceinline__ uint32_t ready(int stage) const {
    return full(kAheadParts + 2, stage);
  }
  __device__ __forceinline__ uint32_t turn(int stage) const { return full(kAheadParts + 3, stage); }
};

struct AheadRing {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == kAheadStages) stage = 0, parity ^= 1;
  }
  // The stage before.
  __device__ __forceinline__ AheadRing before() const {
    return stage > 0 ? AheadRing{stage - 1, parity} : AheadRing{kAheadStages - 1, parity ^ 1};
  }
};

// The loading warp tells the others this of a step, so that they need no registers for the share.
struct alignas(16) AheadNote {
  enum Flag { kEnds = 1, kLast = 2, kBegins = 4, kShared = 8 };

  int b;
  int key;     // the first
  int length;  // of the sequence
  int flags;   // the lane's last step of the sequence; its last of all; the lane has the sequence's
               // first step; other lanes have steps of it
};

// A note, as store_rows() asks for it.
struct AheadSteps {
  int b;
  int flags;
  int first;

  __device__ __forceinline__ bool shared() const { return flags & AheadNote::kShared; }
};

__device__ __forceinline__ AheadNote* ahead_note(unsigned char* pointer, int stage) {
  return reinterpret_cast<AheadNote*>(pointer + kAheadNotes) + stage;
}

// Factors of the block's rows.
__device__ __forceinline__ float* ahead_factors(unsigned char* pointer, int stage) {
  return reinterpret_cast<float*>(pointer + kAheadFactors) + stage * kMlaRows;
}

// True if the phase with that parity is over.
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;"
      " selp.u32 %0, 1, 0, done; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// The step that is loaded next. It lies in shared memory: the registers of the warpgroup that loads
// have its sums.
struct AheadCursor {
  Share share;
  int step;  // -1: nothing
};
static_assert(sizeof(AheadCursor) <= 32);

__device__ __forceinline__ AheadCursor* ahead_cursor(unsigned char* pointer) {
  return reinterpret_cast<AheadCursor*>(pointer + kAheadCursor);
}

// The first row of the next step in the maps, or -1: no key of it counts. One warp calls it.
__device__ __forceinline__ int ahead_row(const MlaDecodeArgs& args, unsigned char* pointer) {
  const AheadCursor* const cursor = ahead_cursor(pointer);
  const int key = cursor->step * kMlaStep;
  if (cursor->step < 0 || key >= cursor->share.length) return -1;
  const char* const table =
      reinterpret_cast<const char*>(args.page_table) + cursor->share.b * args.table_stride;
  const int entry =
      load_strided(reinterpret_cast<const int32_t*>(table), args.table_step, key >> args.page_bits);
  const int page = entry < 0 || entry > args.last_page ? args.last_page : entry;
  return page * args.page_rows + (key & ((1 << args.page_bits) - 1));
}

// Brings the block's queries of a sequence to the L2. One warp calls it.
__device__ __forceinline__ void prefetch_queries(const MlaDecodeArgs& args, int b) {
  const int row_block = static_cast<int>(blockIdx.x) % args.row_blocks;
  for (int row = threadIdx.x % 32; row < kMlaRows; row += 32) {
    const int at = row_block * kMlaRows + row;
    if (at >= args.rows) return;
    const int query = at / args.heads, head = at - query * args.heads;
    const char* const from =
        args.q + b * args.q_strides[0] + query * args.q_strides[1] + head * args.q_strides[2];
#pragma unroll 1
    for (int line = 0; line < kMlaKey * 2; line += 128) prefetch_l2(from + line);
  }
}

// box_multicast() of a map with three dimensions.
__device__ __forceinline__ void boxes_multicast(void* to, const CUtensorMap* map, int column,
                                                int row, int block, uint64_t* barrier,
                                                uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(block), "r"(shared_address(barrier)), "h"(ranks)
      : "memory");
}

// Loads the next step, if there is one, to the stage, which both blocks of the pair have freed.
// `row` is ahead_row(). Each block loads a half of the values into both, and the rotary columns of
// every other step. One warp calls it.
__device__ __forceinline__ void load_ahead(const MlaDecodeArgs& args, const CUtensorMap* map,
                                           const CUtensorMap* halves, const AheadMemory& memory,
                                           unsigned char* pointer, int stage, int row) {
  int next = -1;
  __syncwarp();  // all have read the cursor
  if (threadIdx.x % 32 == 0) {
    AheadCursor* const cursor = ahead_cursor(pointer);
    Share share = cursor->share;
    const int step = cursor->step;
    if (step >= 0) {
      const bool loads = row >= 0;
      const auto full = [&](int part) {
        return reinterpret_cast<uint64_t*>(pointer + (memory.full(part, stage) - memory.base));
      };
      unsigned char* const to = pointer + (memory.tile(stage) - memory.base);
      const bool ends = step + 1 == share.last;
      *ahead_note(pointer, stage) = {
          share.b, step * kMlaStep, share.length,
          (ends ? AheadNote::kEnds : 0) |
              (ends && share.origin + share.last >= share.end ? AheadNote::kLast : 0) |
              (share.first == 0 ? AheadNote::kBegins : 0) |
              (share.shared() ? AheadNote::kShared : 0)};
#pragma unroll
      for (int part = 0; part < kAheadParts; ++part) {
        mbarrier_expect(full(part), loads ? part_blocks(part) * kMlaBlock : 0);
      }
      if (loads) {
        const auto load = [&](int part) {
          unsigned char* const at = to + part_block(part) * kMlaBlock;
          if (part == 1) {
            if (args.pair) {
              box_multicast(at, map, kMlaLatent, row, full(1), 0b11);
            } else {
              box_load(at, map, kMlaLatent, row, full(1));
            }
          } else if (args.pair) {
            boxes_multicast(at, halves, 0, row, part_block(part), full(part), 0b11);
          } else {
            box_load(at, halves, 0, row, part_block(part), full(part));
          }
        };
        const int rank = args.pair ? static_cast<int>(cluster_rank()) : -1;
        if (rank != 1) load(0);
        if (rank < 0 || step % 2 == rank) load(1);
        if (rank != 0) load(2);
      }
      cursor->step = step + 1;
      if (ends) {
        const bool more = share.next(args);
        cursor->step = more ? share.first : -1;
        cursor->share = share;
        if (more) next = share.b;
      }
    }
  }
  next = __shfl_sync(kFullWarp, next, 0);
  if (next >= 0) prefetch_queries(args, next);
  __syncwarp();
}

}  // namespace tiercel

#endif  // KERNELS_MLA_AHEAD_CUH_
