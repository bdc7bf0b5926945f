// SPDX-License-Identifier: Apache-2.0
// Stores of values as float8, divided by a scale.
#ifndef KERNELS_ROTARY_FLOAT8_STORE_CUH_
#define KERNELS_ROTARY_FLOAT8_STORE_CUH_

#include <cstdint>

#include "kernels/rotary/element_formats.cuh"
#include "kernels/sm90/narrow_floats.cuh"

namespace tiercel {

// The divisor of values that become float8.
struct Divisor {
  float scale, inverse;
  bool one;
  bool plain;  // neither overflow nor underflow is possible, and the scale is not just below a
               // power of two
};

__device__ __forceinline__ Divisor divisor_by(float scale) {
  const bool plain =
      scale >= 0x1p-60f && scale <= 0x1p60f && (__float_as_uint(scale) & 0x7fffffu) != 0x7fffffu;
  return {scale, __frcp_rn(scale), false, plain};
}

__device__ __forceinline__ Divisor divisor_of(const float* scales, bool per_head, int head) {
  if (scales == nullptr) return {1.0f, 1.0f, true, true};
  return divisor_by(scales[per_head ? head : 0]);
}

// x / scale for a plain scale: x * (1 / scale) and one Newton step. Rounded to float8 it equals the
// correctly rounded quotient, because no quotient of an x with at most 11 bits is close enough to a
// boundary between two float8. (Tested: all bfloat16 and float16, 700 scales.)
__device__ __forceinline__ float quotient(float x, const Divisor& divisor) {
  const float near = x * divisor.inverse;
  const float refined = fmaf(fmaf(-near, divisor.scale, x), divisor.inverse, near);
  return copysignf(fabsf(near) < 512.0f ? refined : near,
                   x);  // handles infinities; zeros keep their sign
}

// `x` has kElements floats, by [].
template <int kElements, typename Values>
__device__ __forceinline__ void store_float8(char* to, const Values& x, const Divisor& divisor) {
  float quotients[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) quotients[i] = x[i];
  if (!divisor.one) {
    if (divisor.plain) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) quotients[i] = quotient(x[i], divisor);
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) quotients[i] = __fdiv_rn(quotients[i], divisor.scale);
    }
  }
  if constexpr (kElements == 1) {
    *to = static_cast<char>(float2_to_e4m3x2(quotients[0], 0.0f));
  } else {
    uint32_t words[kElements / 4];
#pragma unroll
    for (int w = 0; w < kElements / 4; ++w) words[w] = float4_to_e4m3x4(quotients + w * 4);
    store_vector(to, words);
  }
}

}  // namespace tiercel

#endif  // KERNELS_ROTARY_FLOAT8_STORE_CUH_
