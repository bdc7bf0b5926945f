// SPDX-License-Identifier: Apache-2.0
// The warp that loads the weights in fused_moe for few tokens, and the data that warps share.
#ifndef KERNELS_MOE_FEW_TOKENS_LOADER_CUH_
#define KERNELS_MOE_FEW_TOKENS_LOADER_CUH_

#include <cstdint>

#include "kernels/moe/few_tokens_grid.cuh"
#include "kernels/moe/few_tokens_kernels.h"
#include "kernels/sm90/tma.cuh"

namespace tiercel {

struct alignas(16) FewShared {
  uint64_t full[kFewMaxSlots], empty[kFewMaxSlots];
  uint64_t known[kFewKnown];  // barriers: unit[] has the number of a unit of up
  int unit[kFewKnown];        // -1: none
  int taken;                  // units of this block
  unsigned before;            // few_arrived when the launch began
  int expert[kFewIds];        // by entry, for the multiplying warps
  int loaded[kFewIds];        // a copy for the loading warp, which waits for no other
  uint8_t count[kFewIds];     // elements by entry
  int element[kFewIds][kFewColumns];
  int token[kFewIds][kFewColumns];
  uint32_t largest[kFewIds];  // magnitude by row
  float weight[kFewIds];
  float result[kFewIds][kFewRows];
};

struct FewRing {
  int slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance(int by, int slots) {
    for (slot += by; slot >= slots; slot -= slots) phase ^= 1;
  }
};

// How many of up's units each block gets in advance.
__device__ __forceinline__ int few_dealt(int units) {
  return units / static_cast<int>(gridDim.x) * 3 / 4;
}

// The whole program of the loading warp. Only what the first copy needs comes before it, also in
// the code, since instructions have to be fetched, too.
__device__ __forceinline__ void load_few_weights(const FewTokensArgs& args, FewShared& s,
                                                 char* ring, int lane) {
  FewRouting routing;
  const int64_t asked = routing.ask(args, lane);
  unsigned before = 0;
  if (lane == 0) {
    static_assert(kFewKnown == kFewMaxSlots);
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(before) : "l"(&few_arrived));
    // One lane, constant addresses: lanes would take turns, and 48 of these take a microsecond.
#pragma unroll
    for (int i = 0; i < kFewMaxSlots; ++i) {
      mbarrier_init(&s.full[i], 1);
      mbarrier_init(&s.empty[i], kFewWarps / kFewGroups);
      mbarrier_init(&s.known[i], 1);
    }
    mbarrier_init_fence();
  }
  routing.make(args, asked, lane);
  if (routing.leads()) s.loaded[routing.entry] = routing.id;
  __syncwarp();
  const int expert_units = args.inner_size / 8;
  const int units = routing.entries * expert_units;
  const int tiles = args.hidden / kFewRows;
  FewRing at;
  // No more in flight than keeps memory busy: loads of the multiplying warps would wait behind
  // them.
  FewRing landed;
  int on_their_way = 0;
  const auto load = [&](const char* from, int bytes) {
    mbarrier_wait(&s.empty[at.slot], at.phase ^ 1);
    if (on_their_way == args.in_flight) {
      mbarrier_wait(&s.full[landed.slot], landed.phase);
      landed.advance(1, args.slots);
    } else {
      ++on_their_way;
    }
    mbarrier_expect(&s.full[at.slot], bytes);
    bulk_load_once(ring + at.slot * args.slot_bytes, from, bytes, &s.full[at.slot]);
    at.advance(1, args.slots);
  };
  int taken = 0, entry = 0, first_unit = 0;  // entry: of the last unit; first_unit: its first unit
  const auto take = [&](int unit) {
    s.unit[taken % kFewKnown] = unit;
    mbarrier_arrive(&s.known[taken % kFewKnown]);
    ++taken;
    for (; unit >= first_unit + expert_units; first_unit += expert_units) ++entry;
    const int i = (unit - first_unit) * 8;
    const char* from = args.w_up + s.loaded[entry] * args.up_expert;
    load(from + static_cast<int64_t>(i) * args.hidden, 8 * args.hidden);
    load(from + static_cast<int64_t>(args.inner_size + i) * args.hidden, 8 * args.hidden);
  };
  // The first units are assigned, the last quarter is taken dynamically: multiprocessors do not
  // load equally fast, and all wait for the last one. No copy waits for the first ticket.
  const int dealt = few_dealt(units);
  if (lane == 0 && dealt > 0) take(blockIdx.x);
  if (lane == 0) s.before = before;
  __syncwarp();
  asm volatile("bar.arrive 2, %0;" ::"n"(kFewThreads) : "memory");
  if (lane != 0) return;
  FewGrid& grid = few_grids[before >> 30];
  int ticket = atomicAdd(&grid.taken, 1);
  while (taken < dealt) take(blockIdx.x + taken * gridDim.x);
  for (int unit; (unit = dealt * gridDim.x + ticket) < units; take(unit)) {
    ticket = atomicAdd(&grid.taken, 1);
  }
  s.taken = taken;
  for (int i = 0; i < kFewGroups; ++i) {
    s.unit[(taken + i) % kFewKnown] = -1;
    mbarrier_arrive(&s.known[(taken + i) % kFewKnown]);
  }
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    for (int e = 0; e < routing.entries; ++e) {
      load(args.w_down + s.loaded[e] * args.down_expert +
               static_cast<int64_t>(tile) * kFewRows * args.inner_size,
           kFewRows * args.inner_size);
    }
  }
  wait_for_few_grid(before);
}

}  // namespace tiercel

#endif  // KERNELS_MOE_FEW_TOKENS_LOADER_CUH_
