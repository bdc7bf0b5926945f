// SPDX-License-Identifier: Apache-2.0
// What fused_moe of few tokens routes, and how its blocks of threads wait for each other.
#ifndef KERNELS_MOE_FEW_TOKENS_GRID_CUH_
#define KERNELS_MOE_FEW_TOKENS_GRID_CUH_

#include <cstdint>

#include "kernels/moe/few_tokens_kernels.h"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

// The multiplying warps only.
__device__ __forceinline__ void multipliers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kFewWarps * 32) : "memory");
}

// What the ids say, in every warp alike: a lane an element. An entry is an expert with up to
// kFewColumns of its elements.
struct FewRouting {
  int id, entry, column;  // of this lane's element; -1: no expert's
  int count;              // elements of the entry that this lane leads
  int entries;
  unsigned valid;  // a bit an element

  __device__ __forceinline__ void make(const FewTokensArgs& args, int lane) {
    id = -1;
    if (lane < args.tokens * args.per_token) {
      if (args.id_words == 2) {
        const int64_t wide = static_cast<const int64_t*>(args.ids)[lane];
        if (wide >= 0 && wide < args.experts) id = static_cast<int>(wide);
      } else {
        const int narrow = static_cast<const int*>(args.ids)[lane];
        if (narrow >= 0 && narrow < args.experts) id = narrow;
      }
    }
    valid = __ballot_sync(kFullWarp, id >= 0);
    const unsigned same = __match_any_sync(kFullWarp, id);
    const unsigned before = (1u << lane) - 1;
    const int rank = __popc(same & before);
    column = rank % kFewColumns;
    const unsigned leaders = __ballot_sync(kFullWarp, leads());
    entries = __popc(leaders);
    count = min(kFewColumns, __popc(same) - rank);
    const unsigned mine = leaders & same & (before | 1u << lane);
    const int leader = mine == 0 ? 0 : 31 - __clz(mine);
    entry = __popc(leaders & ((1u << leader) - 1));
  }
  __device__ __forceinline__ bool leads() const { return id >= 0 && column == 0; }
};

// Of all launches on a device. A grid takes more than half of every multiprocessor's shared memory,
// so a block of the next one begins where one of this has ended: when all of this one are behind
// their barrier, and all before it have ended.
__device__ unsigned
    few_arrived;  // in its two highest bits launches behind their barriers, modulo 4

// What blocks of a launch share; zero when it begins.
struct FewGrid {
  int taken;                  // units of up that went to whoever came
  uint32_t largest[kFewIds];  // of each element's row between the halves, as a float's bits
};
__device__ FewGrid few_grids[4];  // by few_arrived when a launch begins

// For the launch after the next one: what the one before the last left. By one warp, before the
// barrier, which the next launch waits for.
__device__ __forceinline__ void clear_few_grid(unsigned before) {
  static_assert(kFewIds == 32, "a lane each");
  FewGrid& grid = few_grids[((before >> 30) + 2) % 4];
  if (threadIdx.x == 0) grid.taken = 0;
  grid.largest[threadIdx.x] = 0;
}

// The grid's barrier: few_arrived's highest bits change once all blocks have arrived. All blocks
// run at the same time, and `before` is what it was when the kernel began. Whoever returns sees
// what all wrote before.
__device__ __forceinline__ void grid_barrier(unsigned before) {
  multipliers_sync();
  if (threadIdx.x == 0) {
    const unsigned mine = blockIdx.x == 0 ? 0x40000000u - (gridDim.x - 1) : 1u;
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(&few_arrived), "r"(mine)
                 : "memory");
    unsigned now;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                   : "=r"(now)
                   : "l"(&few_arrived)
                   : "memory");
    } while ((before ^ now) >> 30 == 0);
  }
  multipliers_sync();
}

}  // namespace tiercel

#endif  // KERNELS_MOE_FEW_TOKENS_GRID_CUH_
