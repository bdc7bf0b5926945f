// SPDX-License-Identifier: Apache-2.0
// Constants of sampling; maxima and sums of a warp's logits.
#ifndef KERNELS_SAMPLING_LOGITS_CUH_
#define KERNELS_SAMPLING_LOGITS_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/sampling/sample_kernels.h"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

inline constexpr int kWarps = kSampleThreads / 32;
inline constexpr int kVectorBytes = 16;
inline constexpr float kInfinity = __builtin_huge_valf();
// Weights as whole numbers: of filtered rows, and of one segment of another row.
inline constexpr float kUnit = 2147483648.0f;         // 2^31
inline constexpr float kFineUnit = 1099511627776.0f;  // 2^40
inline constexpr int kFixedBits = 23;                 // of d in fixed point
inline constexpr int kBinBits = 9;
static_assert(1 << kBinBits == kSampleBins);
// Rows with as few candidates need no histograms.
inline constexpr int kFew = 256;
static_assert(kFew <= kSampleThreads);
// A guess where top-p ends: one in so many tokens, and how far the weight of those behind it may be
// off.
inline constexpr int kSampled = 16;
inline constexpr float kMargin = 0.125f;
// In a row with few segments, each segment has the maxima of that many groups of lanes.
inline constexpr int kGroups = 4;
inline constexpr int kGroupedSegments = 64;

template <typename T>
__device__ __forceinline__ T parameter(const SampleParameter<T>& parameter, int64_t row) {
  return parameter.of_rows == nullptr ? parameter.of_all : parameter.of_rows[row];
}

// A NaN wins.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// The larger value of each 16-bit half of a and b, or NaN.
template <typename Format>
__device__ __forceinline__ uint32_t max_pairs_or_nan(uint32_t a, uint32_t b) {
  uint32_t larger;
  if constexpr (std::is_same_v<Format, BFloat16>) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  } else {
    static_assert(std::is_same_v<Format, Float16>);
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  }
  return larger;
}

// The largest of a lane's logits, or NaN.
template <typename Format, int kVectors>
__device__ __forceinline__ float largest_of(const uint32_t (&words)[kVectors][4]) {
  if constexpr (Format::kPerWord == 2) {
    uint32_t pairs = words[0][0];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (uint32_t word : words[i]) pairs = max_pairs_or_nan<Format>(pairs, word);
    }
    float two[2];
    Format::unpack(pairs, two);
    return max_or_nan(two[0], two[1]);
  } else {
    float most = -kInfinity;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (uint32_t word : words[i]) most = max_or_nan(most, __uint_as_float(word));
    }
    return most;
  }
}

// The warp's largest value: NaN, as max_or_nan makes it, is the largest of the integers too.
__device__ __forceinline__ float warp_largest(float value) {
  const int bits = __float_as_int(value);
  const int most = __reduce_max_sync(kFullWarp, bits ^ (bits >> 31 & 0x7fffffff));
  return __int_as_float(most ^ (most >> 31 & 0x7fffffff));
}

// The largest value of the lane's group.
__device__ __forceinline__ float largest_of_group(float value) {
#pragma unroll
  for (int offset = 32 / kGroups / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

__device__ __forceinline__ uint64_t warp_sum(uint64_t value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

// The sum of the values of this lane and of those before it.
__device__ __forceinline__ uint64_t warp_running_sum(uint64_t value) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t below = __shfl_up_sync(kFullWarp, value, offset);
    if (threadIdx.x % 32 >= offset) value += below;
  }
  return value;
}

// The row's sum of exponentials relative to its largest logit, from the pairs of its segments:
// their maximum, and their sum relative to that. For one warp.
template <typename Pair>
__device__ __forceinline__ float plain_sum(int segments, float largest, Pair pair) {
  float sum = 0.0f;
#pragma unroll 1
  for (int s = threadIdx.x % 32; s < segments; s += 32) {
    const float2 of_segment = pair(s);
    const float m = of_segment.x;
    sum += m == -kInfinity ? 0.0f : of_segment.y * exp2_approx((m - largest) * kLog2E);
  }
  return lanes_reduce<32>(sum, Sum());
}

// The warp's sum of weights of a segment, relative to `base`: in one order everywhere.
template <int kVectors, int kColumns>
__device__ __forceinline__ float segment_sum(const float (&values)[kVectors][kColumns], float base,
                                             float scale) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (float x : values[i]) sum += exp2_approx((x - base) * scale);
  }
  return lanes_reduce<32>(sum, Sum());
}

// ceil(share * whole), at least 1; share below 1.
__device__ __forceinline__ uint64_t part_of(float share, uint64_t whole) {
  const uint64_t fixed = __float2ull_rn(fmaxf(share, 0.0f) * 18446744073709551616.0f);
  const uint64_t up = whole * fixed != 0 ? 1 : 0;
  const uint64_t part = __umul64hi(whole, fixed) + up;
  return part == 0 ? 1 : part;
}

template <typename Format>
inline constexpr int kPerVector = kVectorBytes / Format::kBytes;

// All bits of each half of the word are set where a >= b.
template <typename Format>
__device__ __forceinline__ uint32_t pairs_at_least(uint32_t a, uint32_t b) {
  uint32_t mask;
  if constexpr (std::is_same_v<Format, BFloat16>) {
    asm("set.ge.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
  } else {
    static_assert(std::is_same_v<Format, Float16>);
    asm("set.ge.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
  }
  return mask;
}

}  // namespace tiercel

#endif  // KERNELS_SAMPLING_LOGITS_CUH_
