// SPDX-License-Identifier: Apache-2.0
// The activations and their slopes in float32, each in two forms: `kExact` to the last place or two
// (for float32 results), otherwise to 2^-20 with few instructions (for results of at most 11 bits,
// where a streaming kernel has some 27 instruction slots an element).
#ifndef KERNELS_ACTIVATION_FUNCTIONS_CUH_
#define KERNELS_ACTIVATION_FUNCTIONS_CUH_

#include <cstdint>

#include "kernels/sm90/exponential.cuh"

namespace tiercel {

__device__ __forceinline__ float fast_reciprocal(float x) {
  float value;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

template <bool kExact>
__device__ __forceinline__ float exponential(float x) {
  return kExact ? expf(x) : exp2_approx(x * kLog2E);
}

// x / d for d >= 1, d = inf included: what IEEE division gives, but for rare last places.
template <bool kExact>
__device__ __forceinline__ float quotient(float x, float d) {
  const float r = fast_reciprocal(d);
  const float q = x * r;
  if (!kExact) return q;
  const float rest = fmaf(-d, q, x);
  return rest == rest ? fmaf(rest, r, q) : q;  // NaN where x or d is infinite
}

// x * sigmoid(z) and what its slope is made of.
template <bool kExact>
__device__ __forceinline__ float sigmoid_times(float z, float x) {
  return quotient<kExact>(x, 1.0f + exponential<kExact>(-z));
}
template <bool kExact>
__device__ __forceinline__ float sigmoid(float z) {
  return sigmoid_times<kExact>(z, 1.0f);
}

// Every activation has
//   value(x), and slope(x, &value), its derivative; NaN in, NaN out; infinities as in PyTorch.
template <bool kExact>
struct Silu {
  static __device__ __forceinline__ float value(float x) { return sigmoid_times<kExact>(x, x); }
  static __device__ __forceinline__ float slope(float x, float* value) {
    const float s = sigmoid<kExact>(x);
    *value = x * s;
    return s * fmaf(x, 1.0f - s, 1.0f);
  }
};

template <bool kExact>
struct Relu {
  static __device__ __forceinline__ float value(float x) { return x <= 0.0f ? 0.0f : x; }
  static __device__ __forceinline__ float slope(float x, float* result) {
    *result = value(x);
    return x <= 0.0f ? 0.0f : 1.0f;
  }
};

// By the error function: x * Phi(x).
template <bool kExact>
struct Gelu {
  // Phi(x), and exp(-x^2 / 2) as a by-product.
  static __device__ __forceinline__ float normal_cdf(float x, float* bell) {
    constexpr float kInvSqrt2 = 0.70710678f;
    if constexpr (kExact) {
      *bell = expf(-0.5f * x * x);
      return 0.5f * (1.0f + erff(x * kInvSqrt2));
    } else {
      // Abramowitz and Stegun 7.1.26, as erfc(|x| / sqrt 2) / 2: no cancellation for x < 0.
      const float t = fast_reciprocal(fmaf(fabsf(x), 0.3275911f * kInvSqrt2, 1.0f));
      *bell = exp2_approx(x * x * (-0.5f * kLog2E));
      float p = fmaf(t, 0.5f * 1.061405429f, 0.5f * -1.453152027f);
      p = fmaf(t, p, 0.5f * 1.421413741f);
      p = fmaf(t, p, 0.5f * -0.284496736f);
      p = fmaf(t, p, 0.5f * 0.254829592f);
      const float tail = p * t * *bell;
      return x > 0.0f ? 1.0f - tail : tail;
    }
  }
  static __device__ __forceinline__ float value(float x) {
    float bell;
    return x * normal_cdf(x, &bell);
  }
  static __device__ __forceinline__ float slope(float x, float* value) {
    constexpr float kInvSqrt2Pi = 0.39894228f;
    float bell;
    const float cdf = normal_cdf(x, &bell);
    *value = x * cdf;
    return fmaf(x * kInvSqrt2Pi, bell, cdf);
  }
};

// By tanh: 0.5 x (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
template <bool kExact>
struct GeluTanh {
  static constexpr float kTwoBeta = 1.59576912f;  // 2 sqrt(2 / pi)
  static constexpr float kKappa = 0.044715f;
  static __device__ __forceinline__ float two_u(float x) {
    return kTwoBeta * x * fmaf(kKappa * x, x, 1.0f);
  }
  static __device__ __forceinline__ float value(float x) {
    return sigmoid_times<kExact>(two_u(x), x);
  }
  static __device__ __forceinline__ float slope(float x, float* value) {
    const float s = sigmoid<kExact>(two_u(x));
    *value = x * s;
    const float two_du = fmaf(3.0f * kTwoBeta * kKappa * x, x, kTwoBeta);
    return s * fmaf(x * two_du, 1.0f - s, 1.0f);
  }
};

}  // namespace tiercel

#endif  // KERNELS_ACTIVATION_FUNCTIONS_CUH_
