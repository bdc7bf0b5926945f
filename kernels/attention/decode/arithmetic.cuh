// SPDX-License-Identifier: Apache-2.0
// Arithmetic that decode_attention and decode_combine share.
#ifndef KERNELS_ATTENTION_DECODE_ARITHMETIC_CUH_
#define KERNELS_ATTENTION_DECODE_ARITHMETIC_CUH_

#include <cstdint>

#include "kernels/sm90/exponential.cuh"

namespace tiercel {

// tanh by exponentials: its instruction has only 11 bits.
__device__ __forceinline__ float hyperbolic_tangent(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(x * 2.885390082f));
}

// Two e4m3, in the low or the high half of `word`, as float16.
template <bool kHigh>
__device__ __forceinline__ uint32_t e4m3_pair_to_half2(uint32_t word) {
  uint32_t halves;
  if constexpr (kHigh) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }"
        : "=r"(halves)
        : "r"(word));
  } else {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }"
        : "=r"(halves)
        : "r"(word));
  }
  return halves;
}

__device__ __forceinline__ float scale_of(const float* scale, bool per_head, int head) {
  return scale == nullptr ? 1.0f : scale[per_head ? head : 0];
}

// The factor of a row's sum of weighted values: 0 for a row that sees no key.
__device__ __forceinline__ float normalizer(float sum, float scale) {
  return sum == 0.0f ? 0.0f : scale / sum;
}

// The natural logarithm of a row's sum, whose terms are relative to 2 to the power of `largest`.
__device__ __forceinline__ float log_of_sum(float largest, float sum) {
  constexpr float kLn2 = 0.693147181f;
  return (largest + log2f(sum)) * kLn2;
}

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_DECODE_ARITHMETIC_CUH_
