// SPDX-License-Identifier: Apache-2.0
// Shared by the kernels of top_k_indices: keys, and the rounds that find the k-th largest.
#ifndef KERNELS_MLA_TOP_K_CUH_
#define KERNELS_MLA_TOP_K_CUH_

#include <cstdint>

#include "kernels/mla/top_k_kernels.h"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

// An integer of the same order: 0 for minus infinity, which is no candidate; NaN above all.
__device__ __forceinline__ uint32_t top_k_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 is 0
  if (x == -INFINITY) return 0;
  if (x != x) return 0xfffffffeu;
  return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}

// Keys from `lowest` to `lowest` + `span`: those with the digits so far.
struct TopKRange {
  uint32_t lowest;
  uint32_t span;

  __device__ __forceinline__ bool has(uint32_t key) const { return key - lowest <= span; }
  // Bits below the next digit, of up to 11 bits.
  __device__ __forceinline__ int shift() const { return max(21 - __clz(span), 0); }
  __device__ __forceinline__ TopKRange of(uint32_t digit) const {
    const uint32_t offset = digit << shift();
    return {lowest + offset, min(span - offset, (1u << shift()) - 1)};
  }
};

// The first digit has 32 values for each power of 2 from 2^-16 to 2^16 of either sign, so that
// usual numbers spread over many bins. Smaller and larger ones have the nearest value.
inline constexpr uint32_t kTopKLeast = 0x37800000;  // the bits of 2^-16
inline constexpr int kTopKFine = 18;                // bits below the digit
inline constexpr uint32_t kTopKHalf = kTopKBins / 2;

__device__ __forceinline__ uint32_t top_k_first_digit(uint32_t key) {
  const bool negative = key >> 31 == 0;
  const int magnitude = static_cast<int>(key ^ (negative ? 0x7fffffffu : 0x80000000u));
  const int place = min(max((magnitude - static_cast<int>(kTopKLeast)) >> kTopKFine, 0),
                        static_cast<int>(kTopKHalf) - 1);
  return place ^ (negative ? kTopKHalf - 1 : kTopKHalf);
}

__device__ __forceinline__ TopKRange top_k_first_range(uint32_t digit) {
  const bool negative = digit < kTopKHalf;
  const uint32_t place = digit ^ (negative ? kTopKHalf - 1 : kTopKHalf);
  const uint32_t low = place == 0 ? 0 : kTopKLeast + (place << kTopKFine);
  const uint32_t high =
      place == kTopKHalf - 1 ? 0x7fffffffu : kTopKLeast + ((place + 1) << kTopKFine) - 1;
  return {negative ? 0x7fffffffu - high : 0x80000000u + low, high - low};
}

// Reads from block `rank`'s shared memory, at the offset that `local` has in this block's.
__device__ __forceinline__ uint4 cluster_load(uint32_t local, uint32_t rank) {
  uint4 v;
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %4, %5;"
      " ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [remote]; }"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "r"(local), "r"(rank)
      : "memory");
  return v;
}

__device__ __forceinline__ uint2 cluster_load_pair(uint32_t local, uint32_t rank) {
  uint2 v;
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %2, %3;"
      " ld.shared::cluster.v2.u32 {%0, %1}, [remote]; }"
      : "=r"(v.x), "=r"(v.y)
      : "r"(local), "r"(rank)
      : "memory");
  return v;
}

inline constexpr int kTopKWarps = kTopKThreads / 32;
inline constexpr int kTopKOwnBins = kTopKBins / kTopKThreads;  // of a thread
static_assert(kTopKOwnBins == 4);

// Everything a block has besides elements.
struct TopKState {
  uint32_t counts[2][kTopKBins];  // of this round and the next one
  uint32_t totals[2];             // of the block: above the k-th largest, equal to it
  uint32_t warps[kTopKWarps][2];
  uint32_t found[3];  // digit, what lies above it, what has it
  int first;          // element of the row that the block has, out of registers
};
static_assert(sizeof(TopKState) <= kTopKStateBytes);

// Waits for all blocks of a row.
__device__ __forceinline__ void top_k_sync(uint32_t blocks) {
  if (blocks == 1) {
    __syncthreads();
  } else {
    cluster_arrive();
    cluster_wait();
  }
}

__device__ __forceinline__ void top_k_count(uint32_t* bins, uint32_t digit) {
  atomicAdd(bins + digit, 1u);
}

__device__ __forceinline__ void top_k_clear(uint32_t (&bins)[kTopKBins]) {
  reinterpret_cast<uint4*>(bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
}

// The thread's own bins, from `bin` on, over all blocks, with several loads in flight.
__device__ __forceinline__ uint4 top_k_bins(const uint32_t* bins, int bin, uint32_t blocks) {
  if (blocks == 1) return *reinterpret_cast<const uint4*>(bins + bin);
  constexpr int kLoads = 4;
  const uint32_t local = shared_address(bins + bin);
  uint4 sum = make_uint4(0, 0, 0, 0);
#pragma unroll 1
  for (uint32_t first = 0; first < blocks; first += kLoads) {
    uint4 other[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      other[i] = first + i < blocks ? cluster_load(local, first + i) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      sum.x += other[i].x, sum.y += other[i].y, sum.z += other[i].z, sum.w += other[i].w;
    }
  }
  return sum;
}

// The digit of the `wanted`-th largest, from the counts of all blocks: {digit, how many have a
// higher one, how many have it}. With fewer than that, digit 0 and {how many, 0}. All blocks have
// counted before; those of the next turn are cleared.
__device__ __forceinline__ uint3 top_k_round(TopKState& shared, int turn, uint32_t wanted,
                                             uint32_t blocks) {
  top_k_sync(blocks);
  top_k_clear(shared.counts[(turn + 1) % 2]);
  const int thread = threadIdx.x;
  // Thread 0 has the highest bins.
  const int bin = kTopKBins - kTopKOwnBins * (thread + 1);
  const uint4 own = top_k_bins(shared.counts[turn % 2], bin, blocks);
  const uint32_t sum = own.x + own.y + own.z + own.w;
  uint32_t upto = sum;  // of this thread and those before
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(kFullWarp, upto, offset);
    if (thread % 32 >= offset) upto += other;
  }
  if (thread % 32 == 31) shared.warps[thread / 32][0] = upto;
  if (thread == kTopKThreads - 1) shared.found[0] = 0, shared.found[2] = 0;
  __syncthreads();
  uint32_t before = 0, total = 0;
  for (int warp = 0; warp < kTopKWarps; ++warp) {
    if (warp < thread / 32) before += shared.warps[warp][0];
    total += shared.warps[warp][0];
  }
  upto += before;
  if (total < wanted) {
    if (thread == 0) shared.found[1] = total;
  } else if (upto >= wanted && upto - sum < wanted) {
    const uint32_t bins[kTopKOwnBins] = {own.w, own.z, own.y, own.x};
    uint32_t above = upto - sum;
#pragma unroll
    for (int i = 0; i < kTopKOwnBins; ++i) {
      if (above < wanted && above + bins[i] >= wanted) {
        shared.found[0] = bin + kTopKOwnBins - 1 - i;
        shared.found[1] = above;
        shared.found[2] = bins[i];
        break;
      }
      above += bins[i];
    }
  }
  __syncthreads();
  const uint3 found = make_uint3(shared.found[0], shared.found[1], shared.found[2]);
  __syncthreads();  // found and warps may be written again
  return found;
}

// The k-th largest key. All above it are taken, and `wanted` of those that equal it; with `all`,
// everything is taken that is not below it.
struct TopKth {
  uint32_t prefix;
  uint32_t wanted;
  bool all;

  // The smallest key above it, or not below it.
  __device__ __forceinline__ uint32_t from() const { return all ? max(prefix, 1u) : prefix + 1; }
  __device__ __forceinline__ bool is_tie(uint32_t key) const { return !all && key == prefix; }
};

// From the round of the first digit, `found`, on. each(take) calls take(key) for the thread's keys;
// `turn` is that of the next round.
template <typename Each>
__device__ __forceinline__ TopKth find_kth(TopKState& shared, int turn, uint32_t k, uint32_t blocks,
                                           uint3 found, const Each& each) {
  TopKth kth{0, k, true};
  if (found.z == 0) return kth;  // fewer than k
  TopKRange range = top_k_first_range(found.x);
  for (;; ++turn) {
    kth.wanted -= found.y;
    kth.all = kth.wanted == found.z;
    if (kth.all || range.span == 0) break;
    uint32_t* const bins = shared.counts[turn % 2];
    const int shift = range.shift();
    each([&](uint32_t key) {
      if (key != 0 && range.has(key)) top_k_count(bins, (key - range.lowest) >> shift);
    });
    found = top_k_round(shared, turn, kth.wanted, blocks);
    range = range.of(found.x);
  }
  kth.prefix = range.lowest;
  return kth;
}

// Counts of elements above the k-th largest and equal to it: in the blocks before, and in all.
struct TopKTotals {
  uint32_t above, equal;
  uint32_t all_above, all_equal;
};

// All blocks have written their totals, and a barrier of the row lies between.
__device__ __forceinline__ TopKTotals top_k_totals(const TopKState& shared, uint32_t rank,
                                                   uint32_t blocks) {
  TopKTotals totals{0, 0, 0, 0};
  const uint32_t local = shared_address(shared.totals);
#pragma unroll 1
  for (uint32_t block = 0; block < blocks; ++block) {
    const uint2 other = cluster_load_pair(local, block);
    if (block < rank) totals.above += other.x, totals.equal += other.y;
    totals.all_above += other.x, totals.all_equal += other.y;
  }
  return totals;
}

// Writes -1 behind what was taken: `wanted` of the ties.
__device__ __forceinline__ void top_k_fill(const TopKArgs& args, int32_t* out,
                                           const TopKTotals& totals, uint32_t wanted) {
  const uint32_t taken = totals.all_above + min(totals.all_equal, wanted);
  const uint32_t blocks = cluster_blocks();
  for (uint32_t at = taken + cluster_rank() * kTopKThreads + threadIdx.x; at < args.k;
       at += blocks * kTopKThreads) {
    out[at] = -1;
  }
}

}  // namespace tiercel

#endif  // KERNELS_MLA_TOP_K_CUH_
