// SPDX-License-Identifier: Apache-2.0
// Sorting a thread block's expert numbers, stably, into places that blocks of a cluster agree on.
#ifndef KERNELS_ROUTING_MOE_ALIGN_CUH_
#define KERNELS_ROUTING_MOE_ALIGN_CUH_

#include <cstdint>

#include "kernels/routing/moe_align_kernels.h"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

// The block's shared memory (moe_align_shared_bytes), cut up.
struct AlignShared {
  uint32_t* counts;  // [warps][experts + 1]: a warp's, then the sum of the warps' before it
  uint32_t* totals;  // [cluster blocks][experts]
  uint32_t* first;   // [experts]: where an expert begins among the block's sorted ids
  uint32_t* base;    // [experts]: what takes a place there to its slot
  uint32_t* begin;   // [experts]: an expert's padding
  uint32_t* end;     // [experts]
  uint32_t* sums;    // [2][32]
  uint32_t* sorted;  // [span]
};

__device__ __forceinline__ AlignShared cut_shared(uint32_t* words, int experts, int warps,
                                                  int cluster) {
  AlignShared shared;
  shared.counts = words;
  shared.totals = shared.counts + warps * (experts + 1);
  shared.first = shared.totals + cluster * experts;
  shared.base = shared.first + experts;
  shared.begin = shared.base + experts;
  shared.end = shared.begin + experts;
  shared.sums = shared.end + experts;
  shared.sorted = shared.sums + 64;
  return shared;
}

// A chosen expert as the one to sort by; `experts` where it is not to be counted.
__device__ __forceinline__ uint32_t local_expert(const MoeAlignArgs& args, uint32_t expert) {
  const uint32_t none = args.experts;
  if (args.map_first && expert < none) expert = args.expert_map[expert];
  return expert < none ? expert : none;
}

// Id number `index` as the expert to sort by; `experts` where it is not to be counted.
__device__ __forceinline__ uint32_t expert_at(const MoeAlignArgs& args, uint32_t index) {
  const uint32_t none = args.experts;
  uint32_t expert;
  if (args.wide_ids) {
    const uint2 id = static_cast<const uint2*>(args.ids)[index];
    expert = id.y == 0 ? id.x : none;
  } else {
    expert = static_cast<const uint32_t*>(args.ids)[index];
  }
  return local_expert(args, expert);
}

// The lanes that hold the same expert. The instruction for that is the shortest way for one warp,
// ballots for many.
template <bool kOnce>
__device__ __forceinline__ uint32_t lanes_alike(uint32_t expert, int bits) {
  if constexpr (kOnce) return __match_any_sync(kFullWarp, expert);
  uint32_t alike = kFullWarp;
#pragma unroll 4
  for (int bit = 0; bit < bits; ++bit) {
    const bool set = expert >> bit & 1;
    const uint32_t lanes = __ballot_sync(kFullWarp, set);
    alike &= set ? lanes : ~lanes;
  }
  return alike;
}

__device__ __forceinline__ uint32_t lanes_below() {
  uint32_t mask;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
  return mask;
}

// Ranks of a warp's experts among its own alike, in order; `counts` are the warp's, from zero.
template <int kItems>
__device__ __forceinline__ void rank_warp(uint32_t* counts, const uint32_t (&expert)[kItems],
                                          uint32_t (&rank)[kItems], int bits) {
  uint32_t alike[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) alike[i] = lanes_alike<kItems == 1>(expert[i], bits);
  const uint32_t below = lanes_below();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t before = counts[expert[i]];
    const uint32_t mine = __popc(alike[i] & below);
    __syncwarp();
    if (mine == 0) counts[expert[i]] = before + __popc(alike[i]);
    __syncwarp();
    rank[i] = before + mine;
  }
}

// counts[w * stride] becomes the sum of those before it; returns the sum of all.
__device__ __forceinline__ uint32_t sum_warps(uint32_t* counts, int stride, int warps) {
  uint32_t sum = 0;
  for (int w = 0; w < warps; w += 8) {
    uint32_t count[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) count[i] = w + i < warps ? counts[(w + i) * stride] : 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (w + i < warps) counts[(w + i) * stride] = sum;
      sum += count[i];
    }
  }
  return sum;
}

__device__ __forceinline__ uint32_t scan_warp(uint32_t value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(kFullWarp, value, offset);
    if (lane >= offset) value += other;
  }
  return value;
}

// What precedes the thread's value in the block; `sums` holds 32 words. Has a barrier inside.
__device__ __forceinline__ uint32_t scan_block(uint32_t value, uint32_t* sums, uint32_t* all) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const uint32_t inclusive = scan_warp(value);
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  const uint32_t sum = lane < warps ? sums[lane] : 0;
  const uint32_t before = __reduce_add_sync(kFullWarp, lane < warp ? sum : 0);
  *all = __reduce_add_sync(kFullWarp, sum);
  return before + inclusive - value;
}

// The block that a slot is in; a division costs more than all the rest of a store.
__device__ __forceinline__ uint32_t block_of(const MoeAlignArgs& args, uint32_t slot) {
  return args.block_shift >= 0 ? slot >> args.block_shift : slot / args.block_size;
}

__device__ __forceinline__ void store_slot(const MoeAlignArgs& args, uint32_t slot, uint32_t index,
                                           uint32_t expert) {
  args.sorted_ids[slot] = index;
  const uint32_t block = block_of(args, slot);
  if (block * args.block_size == slot) {  // each block has an id in its first slot
    const bool mark = args.expert_map != nullptr && !args.map_first;
    args.expert_ids[block] = mark ? args.expert_map[expert] : expert;
  }
}

// Slots that no id takes, and blocks that no expert has; `part` of `parts`, by one block each.
__device__ __forceinline__ void store_padding(const MoeAlignArgs& args, const AlignShared& shared,
                                              uint32_t padded, uint32_t part, uint32_t parts) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  // A warp looks at many experts at once; few of them may have padding.
  const int each = min((args.experts + static_cast<int>(parts) * warps - 1) /
                           (static_cast<int>(parts) * warps), 32);
  for (int first = (part * warps + warp) * each; first < args.experts;
       first += parts * warps * each) {
    const int e = first + lane;
    const bool mine = lane < each && e < args.experts;
    const uint32_t begin = mine ? shared.begin[e] : 0, end = mine ? shared.end[e] : 0;
    for (uint32_t left = __ballot_sync(kFullWarp, begin < end); left != 0; left &= left - 1) {
      const uint32_t from = __shfl_sync(kFullWarp, begin, __ffs(left) - 1);
      const uint32_t to = __shfl_sync(kFullWarp, end, __ffs(left) - 1);
      for (uint32_t s = from + lane; s < to; s += 32) args.sorted_ids[s] = args.numel;
    }
  }
  const uint32_t thread = part * blockDim.x + threadIdx.x, threads = parts * blockDim.x;
  for (uint32_t s = padded + thread; s < args.slots; s += threads) args.sorted_ids[s] = args.numel;
  for (uint32_t b = block_of(args, padded) + thread; b < args.blocks; b += threads) {
    args.expert_ids[b] = -1;
  }
  if (thread == 0) *args.num_padded = padded;
}

// Counts a block's ids: each gets its rank among its warp's alike, each warp's counts become sums
// over the warps before it. Id r * 32 + lane of a warp's kItems * 32 is `expert[r]`; the warp's
// counts are zero. Thread e returns how many ids the block has for expert e.
template <int kItems>
__device__ __forceinline__ uint32_t count_block(const MoeAlignArgs& args, const AlignShared& shared,
                                                const uint32_t (&expert)[kItems],
                                                uint32_t (&rank)[kItems], int active_warps) {
  const int warp = threadIdx.x / 32, bins = args.experts + 1, e = threadIdx.x;
  if (warp < active_warps) rank_warp(shared.counts + warp * bins, expert, rank, args.expert_bits);
  __syncthreads();
  return e < args.experts ? sum_warps(shared.counts + e, bins, active_warps) : 0;
}

// Sorts a counted block's ids in shared memory, so that neighbouring threads will write neighbouring
// slots. Thread e has `first`, the place of its expert's first id, in shared.first too.
template <int kItems>
__device__ __forceinline__ void sort_block(const MoeAlignArgs& args, const AlignShared& shared,
                                           const uint32_t (&expert)[kItems],
                                           const uint32_t (&rank)[kItems], int active_warps) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t* counts = shared.counts + warp * (args.experts + 1);
  if (warp >= active_warps) return;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (expert[i] < static_cast<uint32_t>(args.experts)) {
      const uint32_t place = shared.first[expert[i]] + counts[expert[i]] + rank[i];
      shared.sorted[place] = expert[i] << 16 | ((warp * kItems + i) * 32 + lane);
    }
  }
}

// Writes the block's sorted ids to their slots; `first_id` is the number of its first one.
__device__ __forceinline__ void store_block(const MoeAlignArgs& args, const AlignShared& shared,
                                            uint32_t ids, uint32_t first_id) {
  for (uint32_t place = threadIdx.x; place < ids; place += blockDim.x) {
    const uint32_t packed = shared.sorted[place];
    const uint32_t expert = packed >> 16;
    store_slot(args, shared.base[expert] + place, first_id + (packed & 0xffff), expert);
  }
}

// All of it for ids that one block, or the blocks of one cluster, hold in registers. In a cluster,
// cluster_arrive_relaxed() came before.
template <int kItems, bool kCluster>
__device__ __forceinline__ void align_block(const MoeAlignArgs& args, const AlignShared& shared,
                                            const uint32_t (&expert)[kItems], uint32_t first_id,
                                            int active_warps) {
  uint32_t rank[kItems];
  const uint32_t mine = count_block(args, shared, expert, rank, active_warps);

  const int e = threadIdx.x;
  const bool real = e < args.experts;
  const uint32_t part = kCluster ? cluster_rank() : 0;
  const uint32_t parts = kCluster ? cluster_blocks() : 1;
  if constexpr (kCluster) {
    cluster_wait();  // all run
    for (uint32_t p = 0; real && p < parts; ++p) {
      store_remote(shared.totals + part * args.experts + e, p, mine);
    }
    cluster_arrive();
  }

  // Sorted on chip while the cluster's counts are on their way.
  uint32_t ids = 0, first = 0, before = 0, total = mine;
  if constexpr (kCluster) {
    first = scan_block(mine, shared.sums, &ids);
    if (real) shared.first[e] = first;
    __syncthreads();
    sort_block(args, shared, expert, rank, active_warps);
    cluster_wait();
    total = 0;
#pragma unroll 8
    for (uint32_t p = 0; real && p < parts; ++p) {
      const uint32_t count = shared.totals[p * args.experts + e];
      before += p < part ? count : 0;
      total += count;
    }
  }
  const uint32_t blocks = block_of(args, total + args.block_size - 1);
  uint32_t all_blocks;
  const uint32_t begin = scan_block(blocks, shared.sums + 32, &all_blocks) * args.block_size;
  if (real) {
    shared.base[e] = begin + before - first;
    shared.begin[e] = begin + total;
    shared.end[e] = begin + blocks * args.block_size;
  }
  __syncthreads();
  if constexpr (kCluster) {
    store_block(args, shared, ids, first_id);
  } else {  // so few that sorting them first would take longer
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t* counts = shared.counts + warp * (args.experts + 1);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (warp < active_warps && expert[i] < static_cast<uint32_t>(args.experts)) {
        const uint32_t slot = shared.base[expert[i]] + counts[expert[i]] + rank[i];
        store_slot(args, slot, first_id + (warp * kItems + i) * 32 + lane, expert[i]);
      }
    }
  }
  store_padding(args, shared, all_blocks * args.block_size, part, parts);
}

}  // namespace tiercel

#endif  // KERNELS_ROUTING_MOE_ALIGN_CUH_
