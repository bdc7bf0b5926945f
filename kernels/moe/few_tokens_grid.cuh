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

  // This lane's id as it lies in memory; -1: none.
  static __device__ __forceinline__ int64_t ask(const FewTokensArgs& args, int lane) {
    if (lane >= args.tokens * args.per_token) return -1;
    return args.id_words == 2 ? static_cast<const int64_t*>(args.ids)[lane]
                              : static_cast<const int*>(args.ids)[lane];
  }

  __device__ __forceinline__ void make(const FewTokensArgs& args, int64_t asked, int lane) {
    id = asked >= 0 && asked < args.experts ? static_cast<int>(asked) : -1;
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
  // An entry's expert, by a whole warp, which so waits for no other.
  __device__ __forceinline__ int expert_of(int which) const {
    const unsigned leader = __ballot_sync(kFullWarp, leads() && entry == which);
    return __shfl_sync(kFullWarp, id, __ffs(leader) - 1);
  }
};

// Of all launches on a device: blocks that have arrived, and in the two highest bits launches all
// of whose blocks have, modulo 4. A grid takes more than half of every multiprocessor's shared
// memory, so a block of the next one begins where one of this has ended: when all of this one have
// arrived, and all before it have ended.
__device__ unsigned few_arrived;

// What blocks of a launch share, by those bits when it begins; zero then.
struct FewGrid {
  int taken;       // units of up that went to whoever came
  unsigned ended;  // blocks whose units of up are over, if they say so: a hint that orders nothing
  // Rows between the halves, bfloat16 with all bits flipped: 0, which would be a NaN that no
  // conversion makes, is what is not there yet. So whoever reads a row needs no other sign.
  uint4 inner[kFewInner / 8];
};
__device__ FewGrid few_grids[4];

// By a warp of each block: its share of what the launch before the last left, for the one after the
// next.
__device__ __forceinline__ void clear_few_grid(unsigned before) {
  FewGrid& grid = few_grids[((before >> 30) + 2) % 4];
  const int lane = threadIdx.x % 32;
  for (unsigned i = blockIdx.x * 32 + lane; i < kFewInner / 8; i += gridDim.x * 32) {
    grid.inner[i] = make_uint4(0, 0, 0, 0);
  }
  if (blockIdx.x == 0 && lane == 0) grid.taken = 0, grid.ended = 0;
  __syncwarp();
}

// By a thread of each block, once all of the block have read few_arrived.
__device__ __forceinline__ void arrive_at_few_grid() {
  const unsigned mine = blockIdx.x == 0 ? 0x40000000u - (gridDim.x - 1) : 1u;
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(&few_arrived), "r"(mine)
               : "memory");
}

// For all blocks to arrive: at the latest before a block ends, so that none of this launch takes
// itself for one of the next.
__device__ __forceinline__ void wait_for_few_grid(unsigned before) {
  unsigned now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(&few_arrived) : "memory");
  } while ((before ^ now) >> 30 == 0);
}

// By a thread of each block, and for all of them: then rows are there, or are on their way.
__device__ __forceinline__ void end_up(FewGrid& grid) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(&grid.ended) : "memory");
}
__device__ __forceinline__ void wait_for_ends(const FewGrid& grid) {
  unsigned now;
  do {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(&grid.ended) : "memory");
  } while (now < gridDim.x);
}

__device__ __forceinline__ void store_inner(FewGrid& grid, int at, uint32_t bits) {
  asm volatile(
      "st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(reinterpret_cast<uint16_t*>(grid.inner) + at),
      "h"(static_cast<uint16_t>(~bits))
      : "memory");
}

// Eight values, if they are there.
__device__ __forceinline__ uint4 ask_inner(const FewGrid& grid, int at) {
  uint4 w;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "l"(grid.inner + at)
               : "memory");
  return w;
}

__device__ __forceinline__ bool all_there(const uint32_t (&words)[4]) {
  uint32_t none = 0;  // a bit where a half is 0
#pragma unroll
  for (int w = 0; w < 4; ++w) none |= (words[w] - 0x00010001u) & ~words[w];
  return (none & 0x80008000u) == 0;
}

}  // namespace tiercel

#endif  // KERNELS_MOE_FEW_TOKENS_GRID_CUH_
