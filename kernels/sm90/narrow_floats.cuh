// SPDX-License-Identifier: Apache-2.0
// e4m3 and e2m1, the 8-bit and 4-bit floats, to and from registers. sm_90 has instructions for e4m3
// only; e2m1 is done by arithmetic.
#ifndef KERNELS_SM90_NARROW_FLOATS_CUH_
#define KERNELS_SM90_NARROW_FLOATS_CUH_

#include <cstdint>

#include "kernels/sm90/vector.cuh"

namespace tiercel {

inline constexpr float kE4M3Max = 448.0f;
inline constexpr float kE2M1Max = 6.0f;

// Two e4m3 in the low half of `bits`, the first in the lower byte. Exact; NaN stays NaN.
__device__ __forceinline__ float2 e4m3x2_to_float2(uint32_t bits) {
  float2 values;
  asm("{ .reg .b16 pair, low, high; .reg .b32 halves;\n"
      "cvt.u16.u32 pair, %2;\n"
      "cvt.rn.f16x2.e4m3x2 halves, pair;\n"
      "mov.b32 {low, high}, halves;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high; }"
      : "=f"(values.x), "=f"(values.y)
      : "r"(bits));
  return values;
}

__device__ __forceinline__ float e4m3_to_float(uint32_t bits) {
  return e4m3x2_to_float2(bits & 0xffu).x;
}

// Rounds to nearest even, saturates at +-448; NaN stays NaN. `first` is in the lower byte.
__device__ __forceinline__ uint32_t float2_to_e4m3x2(float first, float second) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
}

__device__ __forceinline__ uint32_t float4_to_e4m3x4(const float* values) {
  return float2_to_e4m3x2(values[0], values[1]) | float2_to_e4m3x2(values[2], values[3]) << 16;
}

// a + b saturated to [0, 1]; NaN becomes 0.
__device__ __forceinline__ float saturated_sum(float a, float b) {
  float sum;
  asm("add.rn.sat.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}

// The code, 0 to 7, of the magnitude 2 * `half`, rounded to nearest even; magnitudes above 6 become
// 6, NaN becomes 0. The code is in the low bits; the high bits are those of kE2M1Magic. Codes 0-4
// are the multiples of 0.5 up to 2, 4-6 those of 1 up to 4, 6-7 those of 2 up to 6. Each stretch is
// cut out by saturation, counted in its own steps and rounded by adding it to a float whose unit
// is 1. The stretches meet at even codes, so a tie goes to the even code.
inline constexpr uint32_t kE2M1Magic = 0x4b000000u;  // 2^23
__device__ __forceinline__ uint32_t half_magnitude_to_e2m1(float half) {
  float code = fmaf(saturated_sum(half, 0.0f), 4.0f, 8388608.0f);
  code = fmaf(saturated_sum(half, -1.0f), 2.0f, code);
  code = saturated_sum(half, -2.0f) + code;
  return __float_as_uint(code);
}

// The float16 pair of the e2m1 at bits [4i, 4i + 4) and [4i + 16, 4i + 20) of `word`, times 2^-14:
// exponent and mantissa of e2m1 are the low ones of float16, below-normal values included.
template <int i>
__device__ __forceinline__ uint32_t e2m1_pair_to_half2(uint32_t word) {
  constexpr int kSign = 12 - 4 * i;
  constexpr int kRest = 9 - 4 * i;
  const uint32_t sign = word << kSign;
  const uint32_t rest =
      kRest > 0 ? word << (kRest > 0 ? kRest : 0) : word >> (kRest > 0 ? 0 : -kRest);
  return (sign & 0x80008000u) | (rest & 0x0e000e00u);
}

}  // namespace tiercel

#endif  // KERNELS_SM90_NARROW_FLOATS_CUH_
