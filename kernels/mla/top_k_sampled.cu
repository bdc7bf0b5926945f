// SPDX-License-Identifier: Apache-2.0
// top_k_indices of long rows with small k: most elements are compared once and dropped.
//
// A cluster has a row, each of its blocks an equal part. An eighth of it, spread evenly, is counted
// by a first digit, which gives a bound that, by a wide margin, somewhat more than k elements of
// the row reach. Then the part is read once: each warp appends elements that reach the bound to a
// list in shared memory. The k-th largest is found among the lists, as in top_k.cu. If fewer than k
// reach the bound, or more than there is room for, the rounds read the row again instead, so the
// selection is always exact.
//
// Lists are unordered. Selected elements set bits in shared memory, whose prefix sums give their
// positions.
//
// 32 elements cost about 12 instructions of a warp: for 1024 rows of 65536, 190 thousand per
// multiprocessor, 27 us, where memory takes 64 us. Three blocks share a multiprocessor, so that one
// reads while others are in their rounds.
#include <cstdint>

#include "kernels/mla/top_k.cuh"
#include "kernels/mla/top_k_kernels.h"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

constexpr int kListed = kTopKListed / kTopKWarps;  // of a warp
constexpr int kInFlight = 4;                       // 16-byte loads of a thread
constexpr int kBitWords = kTopKSampledPart / 32;
// Every kTopKSampling-th vector is sampled: scattered, because neighbours may be alike.
constexpr int kSampledVectors = kTopKSampledPart / 4 / kTopKSampling / kTopKThreads;
static_assert(kTopKSampledPart / kTopKSampling * sizeof(float) <= kTopKListed * sizeof(uint2));
// Bits of what lies above the k-th largest and what equals it, in place of the counts.
static_assert(2 * kBitWords * sizeof(uint32_t) <= sizeof(TopKState::counts));
static_assert(kBitWords == 4 * kTopKThreads);

struct Part {
  const float* row;  // from the part's first element, at a multiple of 16 bytes
  int length;

  __device__ __forceinline__ int vectors() const { return length / 4; }
  __device__ __forceinline__ float4 vector(int at) const {
    const float none = -__builtin_huge_valf();
    if (at >= vectors()) return make_float4(none, none, none, none);
    return reinterpret_cast<const float4*>(row)[at];
  }
};

// Calls take(key, place) for all elements of the part, read again.
template <typename Take>
__device__ __forceinline__ void each_of_part(const Part& part, const Take& take) {
  const int vectors = part.vectors(), thread = threadIdx.x;
#pragma unroll 1
  for (int at = thread; at < vectors; at += kTopKThreads) {
    const float4 x = part.vector(at);
    take(top_k_key(x.x), at * 4), take(top_k_key(x.y), at * 4 + 1);
    take(top_k_key(x.z), at * 4 + 2), take(top_k_key(x.w), at * 4 + 3);
  }
  const int last = vectors * 4 + thread;
  if (last < part.length) take(top_k_key(part.row[last]), last);
}

// A bound that more than k elements of the row should reach: k / 8 of the sample do, and 8 standard
// deviations more, because neighbours may be alike. 1, which is all but minus infinity, for rows
// with too few elements. `turn` becomes that of the next round.
__device__ __forceinline__ uint32_t sampled_bound(TopKState& shared, float4* sample,
                                                  const Part& part, uint32_t k, uint32_t blocks,
                                                  int& turn) {
  float4 x[kSampledVectors];
#pragma unroll
  for (int i = 0; i < kSampledVectors; ++i) {
    const int unit = i * kTopKThreads + threadIdx.x;
    x[i] = part.vector(unit * kTopKSampling);
  }
#pragma unroll
  for (int i = 0; i < kSampledVectors; ++i) sample[i * kTopKThreads + threadIdx.x] = x[i];
  const auto each = [&](const auto& take) {
#pragma unroll 1
    for (int i = 0; i < kSampledVectors; ++i) {
      const float4 own = sample[i * kTopKThreads + threadIdx.x];
      take(top_k_key(own.x)), take(top_k_key(own.y));
      take(top_k_key(own.z)), take(top_k_key(own.w));
    }
  };
  each([&](uint32_t key) {
    if (key != 0) top_k_count(shared.counts[0], top_k_first_digit(key));
  });
  const uint32_t due = k / kTopKSampling;
  const uint32_t wanted = due + 8 + static_cast<uint32_t>(8.0f * sqrtf(static_cast<float>(due)));
  const uint3 first = top_k_round(shared, 0, wanted, blocks);
  turn = 1;
  if (first.z == 0) return 1;
  TopKRange range = top_k_first_range(first.x);
  if (2 * (first.y + first.z) > 3 * wanted) {  // another digit
    const int shift = range.shift();
    each([&](uint32_t key) {
      if (key != 0 && range.has(key)) {
        top_k_count(shared.counts[1], (key - range.lowest) >> shift);
      }
    });
    range = range.of(top_k_round(shared, 1, wanted - first.y, blocks).x);
    turn = 2;
  }
  return max(range.lowest, 1u);
}

// The least number with a key of at least `bound`, but for NaN, which no number is above.
__device__ __forceinline__ float least_of(uint32_t bound) {
  const uint32_t key = min(max(bound, 0x00800000u), 0xff800000u);
  return __uint_as_float(key ^ (key >> 31 != 0 ? 0x80000000u : 0xffffffffu));
}

// Sets `bit` if x reaches the bound, or is NaN. These two are without branches.
__device__ __forceinline__ void mark_taken(uint32_t& marks, uint32_t bit, float x, float least) {
  asm volatile("{ .reg .pred taken; setp.geu.f32 taken, %1, %2; @taken or.b32 %0, %0, %3; }"
               : "+r"(marks)
               : "f"(x), "f"(least), "r"(bit));
}

// Stores x and its place if `bit` is set, and advances `to`.
__device__ __forceinline__ void store_taken(uint32_t& to, uint32_t marks, uint32_t bit, float x,
                                            int place) {
  asm volatile(
      "{ .reg .pred taken; .reg .b32 own; and.b32 own, %1, %2; setp.ne.u32 taken, own, 0;"
      " @taken st.shared.f32 [%0], %3; @taken st.shared.u32 [%0 + 4], %4;"
      " @taken add.u32 %0, %0, 8; }"
      : "+r"(to)
      : "r"(marks), "r"(bit), "f"(x), "r"(place)
      : "memory");
}

__global__ void __launch_bounds__(kTopKThreads, 3)
    top_k_sampled(const __grid_constant__ TopKArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  TopKState& shared = *reinterpret_cast<TopKState*>(memory);
  // An element's bits, and its place in the part.
  uint2* const lists = reinterpret_cast<uint2*>(memory + kTopKStateBytes);
  const uint32_t blocks = cluster_blocks(), rank = cluster_rank();
  const int64_t row = blockIdx.x / blocks;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  top_k_clear(shared.counts[0]);
  if (thread < 2) shared.totals[thread] = 0;
  grid_dependency_wait();
  grid_dependency_launch();

  int length = args.columns;
  if (args.lengths != nullptr) length = min(max(args.lengths[row * args.length_step], 0), length);
  const int each_block = static_cast<int>((length + 4 * blocks - 1) / (4 * blocks) * 4);
  Part part;
  const int first = min(static_cast<int>(rank) * each_block, length);
  part.length = min(each_block, length - first);
  part.row = args.logits + row * args.row_stride + first;
  if (thread == 0) shared.first = first;
  __syncthreads();
  int turn;
  const uint32_t bound =
      sampled_bound(shared, reinterpret_cast<float4*>(lists), part, args.k, blocks, turn);

  const float least = least_of(bound);
  const uint32_t begin = warp * kListed;  // of the warp's list
  uint32_t end = begin;
  // Lanes count first, so that their places need no ballot for each element.
  const auto append = [&](const float4(&x)[kInFlight], int first) {
    uint32_t marks = 0;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      mark_taken(marks, 1u << 4 * i, x[i].x, least), mark_taken(marks, 2u << 4 * i, x[i].y, least);
      mark_taken(marks, 4u << 4 * i, x[i].z, least), mark_taken(marks, 8u << 4 * i, x[i].w, least);
    }
    const uint32_t own = __popc(marks);
    uint32_t upto = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t other = __shfl_up_sync(kFullWarp, upto, offset);
      upto += lane >= offset ? other : 0;
    }
    uint32_t to = shared_address(lists + end + upto - own);
    end += __shfl_sync(kFullWarp, upto, 31);
    if (end > begin + kListed) return;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int place = first + i * kTopKThreads * 4;
      store_taken(to, marks, 1u << 4 * i, x[i].x, place);
      store_taken(to, marks, 2u << 4 * i, x[i].y, place + 1);
      store_taken(to, marks, 4u << 4 * i, x[i].z, place + 2);
      store_taken(to, marks, 8u << 4 * i, x[i].w, place + 3);
    }
  };
  const int vectors = part.vectors();
  const float none = -__builtin_huge_valf();
  float4 x[kInFlight];
  // Warps take turns, so that none gets all of a stretch of large elements.
  for (int tile = warp * 32; tile < vectors; tile += kTopKThreads * kInFlight) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) x[i] = part.vector(tile + i * kTopKThreads + lane);
    append(x, (tile + lane) * 4);
  }
  if (warp == 0) {  // the last one to three of a row
    const int place = vectors * 4 + lane;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) x[i] = make_float4(none, none, none, none);
    if (place < part.length) x[0].x = part.row[place];
    append(x, place);
  }
  if (lane == 0) {
    atomicAdd(&shared.totals[0], end - begin);
    if (end > begin + kListed) atomicAdd(&shared.totals[1], 1u);
  }
  __syncwarp();

  bool from_lists = true;
  end = min(end, begin + kListed);
  const auto each = [&](const auto& take) {
    if (from_lists) {
      for (uint32_t at = begin + lane; at < end; at += 32) {
        const uint2 listed = lists[at];
        take(top_k_key(__uint_as_float(listed.x)), static_cast<int>(listed.y));
      }
    } else {
      each_of_part(part, take);
    }
  };
  uint3 found;
  for (;; from_lists = false) {
    each([&](uint32_t key, int) {
      if (key != 0) top_k_count(shared.counts[turn % 2], top_k_first_digit(key));
    });
    found = top_k_round(shared, turn++, args.k, blocks);
    if (!from_lists) break;
    const TopKTotals reached = top_k_totals(shared, rank, blocks);
    if (reached.all_equal == 0 && (bound == 1 || reached.all_above >= args.k)) break;
  }
  const TopKth kth = find_kth(shared, turn, args.k, blocks, found, [&](const auto& take) {
    each([&](uint32_t key, int) { take(key); });
  });

  top_k_sync(blocks);  // no block reads counts any more
  uint32_t* const above_bits = shared.counts[0];
  uint32_t* const equal_bits = shared.counts[1];
  top_k_clear(shared.counts[0]);
  top_k_clear(shared.counts[1]);
  __syncthreads();
  const uint32_t from = kth.from();
  each([&](uint32_t key, int place) {
    if (key >= from) {
      atomicOr(above_bits + place / 32, 1u << place % 32);
    } else if (kth.is_tie(key)) {
      atomicOr(equal_bits + place / 32, 1u << place % 32);
    }
  });
  __syncthreads();
  uint32_t own[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    own[0] += __popc(above_bits[4 * thread + i]), own[1] += __popc(equal_bits[4 * thread + i]);
  }
  uint32_t upto[2] = {own[0], own[1]};  // of this thread and those before
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t other = __shfl_up_sync(kFullWarp, upto[i], offset);
      if (lane >= offset) upto[i] += other;
    }
  }
  if (lane == 31) shared.warps[warp][0] = upto[0], shared.warps[warp][1] = upto[1];
  __syncthreads();
  for (int other = 0; other < warp; ++other) {
    upto[0] += shared.warps[other][0], upto[1] += shared.warps[other][1];
  }
  if (thread == kTopKThreads - 1) shared.totals[0] = upto[0], shared.totals[1] = upto[1];
  top_k_sync(blocks);
  const TopKTotals totals = top_k_totals(shared, rank, blocks);
  uint32_t above = totals.above + upto[0] - own[0], equal = totals.equal + upto[1] - own[1];
  const int first_place = shared.first;
  int32_t* const out = args.out + row * args.k;
#pragma unroll 1
  for (int i = 4 * thread; i < 4 * thread + 4; ++i) {
    const uint32_t same = equal_bits[i];
    for (uint32_t bits = above_bits[i] | same; bits != 0; bits &= bits - 1) {
      const int bit = __ffs(bits) - 1;
      const uint32_t to = above + min(equal, kth.wanted);
      const bool tie = same >> bit & 1;
      if (!tie || equal < kth.wanted) out[to] = first_place + i * 32 + bit;
      tie ? ++equal : ++above;
    }
  }
  top_k_fill(args, out, totals, kth.all ? 0 : kth.wanted);
  if (blocks > 1) top_k_sync(blocks);  // others may still read this block's totals
}

const TopKKernel kKernels[] = {
    {Kernel("top_k_sampled", reinterpret_cast<const void*>(top_k_sampled), kTopKSampledShared)}};

}  // namespace

const TopKKernel* top_k_sampled_kernels(int* count) {
  *count = 1;
  return kKernels;
}

}  // namespace tiercel
