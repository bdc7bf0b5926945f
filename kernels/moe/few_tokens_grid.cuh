// SPDX-License-Identifier: Apache-2.0
// The routing of fused_moe for few tokens, and how its thread blocks wait for each other.
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

// The routing, the same in every warp, one element per lane. An entry is an expert with up to
// kFewColumns of its elements.
struct FewRouting {
  int id, entry, column;  // of this lane's element; id -1: no expert
  int count;              // elements of the entry that this lane leads
  int entries;
  unsigned valid;  // one bit per element

  // This lane's id as stored; -1 for none.
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
  // An entry's expert, found by a whole warp, so that it waits for no other warp.
  __device__ __forceinline__ int expert_of(int which) const {
    const unsigned leader = __ballot_sync(kFullWarp, leads() && entry == which);
    return __shfl_sync(kFullWarp, id, __ffs(leader) - 1);
  }
};

// Blocks that have arrived, over all launches on a device. The two highest bits count the launches
// all of whose blocks have arrived, modulo 4. A grid takes more than half of every multiprocessor's
// shared memory, so a block of the next grid begins where a block of this one has ended. By then
// all blocks of this grid have arrived and all earlier grids have ended.
__device__ unsigned few_arrived;

// Shared by the blocks of a launch; indexed by those two bits as the launch finds them, and zero
// then.
struct FewGrid {
  int taken;       // units of up handed out dynamically
  unsigned ended;  // blocks that are done with up, where `waits` is set: a hint without ordering
  // Rows between the halves, bfloat16 with all bits flipped. 0 means "not stored yet": it would be
  // a NaN that no conversion produces. So a reader of a row needs no other signal.
  uint4 inner[kFewInner / 8];
};
__device__ FewGrid few_grids[4];

// One warp of each block clears its share of the grid that the launch before the last one used, for
// the launch after the next.
__device__ __forceinline__ void clear_few_grid(unsigned before) {
  FewGrid& grid = few_grids[((before >> 30) + 2) % 4];
  const int lane = threadIdx.x % 32;
  for (unsigned i = blockIdx.x * 32 + lane; i < kFewInner / 8; i += gridDim.x * 32) {
    grid.inner[i] = make_uint4(0, 0, 0, 0);
  }
  if (blockIdx.x == 0 && lane == 0) grid.taken = 0, grid.ended = 0;
  __syncwarp();
}

// Called by one thread per block, once the whole block has read few_arrived.
__device__ __forceinline__ void arrive_at_few_grid() {
  const unsigned mine = blockIdx.x == 0 ? 0x40000000u - (gridDim.x - 1) : 1u;
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(&few_arrived), "r"(mine)
               : "memory");
}

// Waits until all blocks have arrived. Every block does so before it ends, so that no block of this
// launch counts as one of the next.
__device__ __forceinline__ void wait_for_few_grid(unsigned before) {
  unsigned now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(&few_arrived) : "memory");
  } while ((before ^ now) >> 30 == 0);
}

// end_up: called by one thread per block. wait_for_ends: for all blocks; then rows are stored or in
// flight.
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

// Eight values; 0 where not stored yet.
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
