// SPDX-License-Identifier: Apache-2.0
// Sorts a thread block's expert numbers stably into slots that the blocks of a cluster share out.
#ifndef KERNELS_ROUTING_MOE_ALIGN_CUH_
#define KERNELS_ROUTING_MOE_ALIGN_CUH_

#include <cstdint>

#include "kernels/routing/moe_align_kernels.h"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

// The layout of the block's shared memory (moe_align_shared_bytes).
struct AlignShared {
  uint32_t* counts;  // [warps][experts + 1]: per warp, later the sums over the preceding warps
  uint32_t* totals;  // [cluster blocks][experts]
  uint32_t* first;   // [experts]: where an expert's ids begin among the block's sorted ids
  uint32_t* base;    // [experts]: the offset from that position to the slot
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
  shared.sums = shared.base + experts;
  shared.sorted = shared.sums + 64;
  return shared;
}

// The warp's own row of counts.
__device__ __forceinline__ void clear_counts(const AlignShared& shared, int experts) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, bins = experts + 1;
  for (int e = lane; e < bins; e += 32) shared.counts[warp * bins + e] = 0;
}

// Maps chosen experts to those to sort by; args.experts for ids that are not counted.
template <int kItems>
__device__ __forceinline__ void to_local_experts(const MoeAlignArgs& args,
                                                 uint32_t (&expert)[kItems]) {
  const uint32_t none = args.experts;
  if (args.map_first) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (expert[i] < none) expert[i] = args.expert_map[expert[i]];
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) expert[i] = min(expert[i], none);
}

// Loads the experts of the warp's kItems * 32 ids, from the block's `ids` from `first_id` on:
// expert[i] is that of id (warp * kItems + i) * 32 + lane. All loads are issued back to back.
template <int kItems>
__device__ __forceinline__ void load_experts(uint32_t (&expert)[kItems], const MoeAlignArgs& args,
                                             uint32_t first_id, uint32_t ids) {
  const uint32_t first = threadIdx.x / 32 * kItems * 32 + threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kItems; ++i) expert[i] = args.experts;
  if (args.int64_ids) {
    const uint2* data = static_cast<const uint2*>(args.ids) + first_id;
    uint32_t high[kItems] = {};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (first + i * 32 < ids) {
        const uint2 id = data[first + i * 32];
        expert[i] = id.x, high[i] = id.y;
      }
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) expert[i] = high[i] == 0 ? expert[i] : args.experts;
  } else {
    const uint32_t* data = static_cast<const uint32_t*>(args.ids) + first_id;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (first + i * 32 < ids) expert[i] = data[first + i * 32];
    }
  }
  to_local_experts(args, expert);
}

// Writes padding everywhere: numel to all slots, -1 to all blocks' experts. Each thread block
// writes `part` of `parts`. A barrier must follow before the slots are written.
__device__ __forceinline__ void fill_outputs(const MoeAlignArgs& args, uint32_t part,
                                             uint32_t parts) {
  const uint32_t thread = part * blockDim.x + threadIdx.x, threads = parts * blockDim.x;
  const uint32_t head = min(args.slots_head, args.slots), numel = args.numel;
  const uint32_t vectors = (args.slots - head) / 4;
  uint4* middle = reinterpret_cast<uint4*>(args.sorted_ids + head);
  for (uint32_t v = thread; v < vectors; v += threads) {
    middle[v] = make_uint4(numel, numel, numel, numel);
  }
  const uint32_t tail = head + vectors * 4;
  if (thread < head) args.sorted_ids[thread] = numel;
  if (thread < args.slots - tail) args.sorted_ids[tail + thread] = numel;
  for (uint32_t b = thread; b < args.blocks; b += threads) args.expert_ids[b] = -1;
}

// The lanes that hold the same expert, among those that hold one. The match instruction has the
// lowest latency for one id, ballots per bit for many.
template <int kBits, bool kOne>
__device__ __forceinline__ uint32_t lanes_alike(uint32_t expert, uint32_t none) {
  if constexpr (kOne) return __match_any_sync(kFullWarp, expert);
  uint32_t alike = __ballot_sync(kFullWarp, expert != none);
#pragma unroll
  for (int bit = 0; bit < kBits; ++bit) {
    const bool set = expert & 1u << bit;
    const uint32_t lanes = __ballot_sync(kFullWarp, set);
    alike &= lanes ^ (set ? 0u : kFullWarp);
  }
  return alike;
}

__device__ __forceinline__ uint32_t lanes_below() {
  uint32_t mask;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
  return mask;
}

// Ranks each id among the warp's ids of the same expert, in order; `counts` are the warp's and
// begin at 0.
template <int kBits, int kItems>
__device__ __forceinline__ void rank_warp(uint32_t* counts, const uint32_t (&expert)[kItems],
                                          uint32_t (&rank)[kItems], uint32_t none) {
  uint32_t alike[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) alike[i] = lanes_alike<kBits, kItems == 1>(expert[i], none);
  const uint32_t below = lanes_below();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t before = kItems > 1 || i > 0 ? counts[expert[i]] : 0;
    const uint32_t mine = __popc(alike[i] & below);
    __syncwarp();
    if (mine == 0) counts[expert[i]] = before + __popc(alike[i]);
    __syncwarp();
    rank[i] = before + mine;
  }
}

// The number of adjacent threads that share the sum of an expert's counts over the warps.
__device__ __forceinline__ int threads_per_expert(int experts, int active_warps) {
  if (active_warps <= 8) return 1;
  const int threads = blockDim.x;
  return threads >= 4 * experts ? 4 : threads >= 2 * experts ? 2 : 1;
}

// Replaces an expert's count in each warp by the sum over the preceding warps and returns the
// total. `each` threads share the work; this one is number `part`.
__device__ __forceinline__ uint32_t sum_warps(uint32_t* counts, int stride, int warps, int each,
                                              int part) {
  constexpr int kBatch = 8;
  const int share = (warps + each - 1) / each;
  const int first = part * share, end = min(first + share, warps);
  uint32_t all = 0, before = 0;
  for (int w = first; w < end; w += kBatch) {
    uint32_t count[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) count[i] = w + i < end ? counts[(w + i) * stride] : 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) all += count[i];
  }
  for (int step = 1; step < each; step *= 2) {  // executed by all lanes of the warp
    const uint32_t other = __shfl_xor_sync(kFullWarp, all, step);
    before += part & step ? other : 0;
    all += other;
  }
  for (int w = first; w < end; w += kBatch) {
    uint32_t count[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) count[i] = w + i < end ? counts[(w + i) * stride] : 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (w + i < end) counts[(w + i) * stride] = before;
      before += count[i];
    }
  }
  return all;
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

// The exclusive prefix sum of the block's values; `sums` holds 32 words. Contains a barrier.
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

// The block of a slot. A division would cost more than the rest of a store.
__device__ __forceinline__ uint32_t block_of(const MoeAlignArgs& args, uint32_t slot) {
  return args.block_shift >= 0 ? slot >> args.block_shift : slot / args.block_size;
}

__device__ __forceinline__ void store_slot(const MoeAlignArgs& args, uint32_t slot, uint32_t index,
                                           uint32_t expert) {
  args.sorted_ids[slot] = index;
  const uint32_t block = block_of(args, slot);
  if (block * args.block_size == slot) {  // every block has an id in its first slot
    const bool mark = args.expert_map != nullptr && !args.map_first;
    args.expert_ids[block] = mark ? args.expert_map[expert] : expert;
  }
}

// One block stores the number of used slots and zeroes the counters behind it.
__device__ __forceinline__ void store_number(const MoeAlignArgs& args, uint32_t blocks) {
  if (threadIdx.x == 0) *args.num_padded = blocks * args.block_size;
  for (uint32_t i = threadIdx.x; i < args.counters; i += blockDim.x) args.num_padded[1 + i] = 0;
}

// Counts a block's ids. Each id gets its rank among its warp's ids of the same expert; each warp's
// counts, which begin at 0, become sums over the preceding warps. Thread e returns the block's
// number of ids for expert e and sends it to the cluster's other blocks.
template <int kBits, bool kCluster, int kItems>
__device__ __forceinline__ uint32_t count_block(const MoeAlignArgs& args, const AlignShared& shared,
                                                const uint32_t (&expert)[kItems],
                                                uint32_t (&rank)[kItems], int active_warps) {
  const int warp = threadIdx.x / 32, experts = args.experts, bins = experts + 1;
  if (warp < active_warps) {
    rank_warp<kBits>(shared.counts + warp * bins, expert, rank, experts);
  }
  __syncthreads();
  const int each = threads_per_expert(experts, active_warps);
  const int e = threadIdx.x / each, part = threadIdx.x % each;
  const bool real = e < experts;
  const uint32_t total =
      sum_warps(shared.counts + (real ? e : 0), bins, real ? active_warps : 0, each, part);
  if constexpr (kCluster) {
    const uint32_t rank_here = cluster_rank(), blocks = cluster_blocks();
    cluster_wait();  // all blocks run
    for (uint32_t p = part; real && p < blocks; p += each) {
      store_remote(shared.totals + rank_here * experts + e, p, total);
    }
    cluster_arrive();
  }
  if (each == 1) return real ? total : 0;
  if (real && part == 0) shared.first[e] = total;
  __syncthreads();
  return threadIdx.x < static_cast<unsigned>(experts) ? shared.first[threadIdx.x] : 0;
}

// Sorts a counted block's ids in shared memory, so that adjacent threads write adjacent slots.
// shared.first holds the position of each expert's first id.
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

// Writes the block's sorted ids to their slots; `first_id` is the index of its first id.
__device__ __forceinline__ void store_block(const MoeAlignArgs& args, const AlignShared& shared,
                                            uint32_t ids, uint32_t first_id) {
  for (uint32_t place = threadIdx.x; place < ids; place += blockDim.x) {
    const uint32_t packed = shared.sorted[place];
    const uint32_t expert = packed >> 16;
    store_slot(args, shared.base[expert] + place, first_id + (packed & 0xffff), expert);
  }
}

// The whole algorithm for ids that fit the registers of one block or cluster. Call fill_outputs()
// before it and, in a cluster, cluster_arrive_relaxed().
template <int kBits, bool kCluster, int kItems>
__device__ __forceinline__ void align_block(const MoeAlignArgs& args, const AlignShared& shared,
                                            const uint32_t (&expert)[kItems], uint32_t first_id,
                                            int active_warps) {
  uint32_t rank[kItems];
  const uint32_t mine = count_block<kBits, kCluster>(args, shared, expert, rank, active_warps);
  const int e = threadIdx.x;
  const bool real = e < args.experts;

  // Sorts on chip while the cluster's counts are in flight.
  uint32_t ids = 0, first = 0, before = 0, total = mine;
  if constexpr (kCluster) {
    first = scan_block(mine, shared.sums, &ids);
    if (real) shared.first[e] = first;
    __syncthreads();
    sort_block(args, shared, expert, rank, active_warps);
    cluster_wait();
    total = 0;
    const uint32_t part = cluster_rank(), parts = cluster_blocks();
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
  if (real) shared.base[e] = begin + before - first;
  __syncthreads();
  if constexpr (kCluster) {
    store_block(args, shared, ids, first_id);
  } else {  // so few that sorting them first would be slower
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
  if (!kCluster || cluster_rank() == 0) store_number(args, all_blocks);
}

}  // namespace tiercel

#endif  // KERNELS_ROUTING_MOE_ALIGN_CUH_
