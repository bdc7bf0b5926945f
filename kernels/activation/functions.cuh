// SPDX-License-Identifier: Apache-2.0
// The activations and their slopes in float32, each in two forms: `kExact` to some 2^-22 of the
// value (for float32 results), otherwise to some 2^-19 with few instructions (for results of at
// most 11 bits, where a streaming kernel has some 27 instruction slots an element). Both hold as
// far as the value is a normal float32 number, in the tails too: powers that would overflow, or be
// flushed to 0, are scaled; nothing is the difference of two numbers near 1.
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

// x / d for 1 <= d < 2^126: what IEEE division gives, but for rare last places.
__device__ __forceinline__ float quotient(float x, float d) {
  const float r = fast_reciprocal(d);
  const float q = x * r;
  const float rest = fmaf(-d, q, x);
  return rest == rest ? fmaf(rest, r, q) : q;  // NaN where x is infinite
}

// x * sigmoid(z), and sigmoid(z) if it is asked for.
template <bool kExact>
__device__ __forceinline__ float sigmoid_times(float z, float x, float* sigmoid = nullptr) {
  if constexpr (kExact) {
    // From some z on 1 + exp(-z) is too large for a reciprocal; exp(z) long is the sigmoid then,
    // and is made as exp(z + kFar) * exp(-kFar): kFar is a number whose power is nearly a float.
    constexpr float kFar = 0x1.fd5498p+5f, kFarPower = 0x1.1bd72cp-92f;  // 63.666...
    const bool far = z < -kFar;
    const float power = expf(far ? z + kFar : -z);
    const float d = 1.0f + power;
    if (sigmoid != nullptr) *sigmoid = far ? power * kFarPower : quotient(1.0f, d);
    return far ? x * power * kFarPower : quotient(x, d);
  } else {
    // 2^16 * sigmoid: so its reciprocal is finite, and it is no subnormal number, for all z whose
    // sigmoid bfloat16 can tell from 0. x * 2^-16 is exact, of bfloat16's smallest numbers too.
    constexpr float kScale = 0x1p-16f;
    const float scaled = fast_reciprocal(exp2_approx(fmaf(z, -kLog2E, -16.0f)) + kScale);
    if (sigmoid != nullptr) *sigmoid = scaled * kScale;
    return x * kScale * scaled;
  }
}

// The polynomial with these terms, the constant one first.
template <int kCount>
__device__ __forceinline__ float horner(const float (&terms)[kCount], float x) {
  float value = terms[kCount - 1];
#pragma unroll
  for (int i = kCount - 2; i >= 0; --i) value = fmaf(x, value, terms[i]);
  return value;
}

// Every activation has
//   value(x), and slope(x, &value), its derivative; NaN in, NaN out; infinities as in PyTorch.
template <bool kExact>
struct Silu {
  static __device__ __forceinline__ float value(float x) { return sigmoid_times<kExact>(x, x); }
  static __device__ __forceinline__ float slope(float x, float* value) {
    float s;
    *value = sigmoid_times<kExact>(x, x, &s);
    return fmaf(*value, 1.0f - s, s);
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
  // Phi(-a) / exp(-a^2 / 2) for a >= 0 as t * polynomial(t), t = 1 / (1 + kT * a): fitted to the
  // least relative error on [0, 14.2], which is 3.2e-8, or 1.1e-6 with two terms less. (Abramowitz
  // and Stegun's 7.1.26 has this form, but is right to 1.5e-7 of 1: 3.6 % off for Phi(-12.5).)
  static constexpr float kT = kExact ? 0.34f : 0.26f;
  static __device__ __forceinline__ float polynomial(float t) {
    if constexpr (kExact) {
      constexpr float kTerms[] = {0.135620952f,  0.136104062f,   0.115260288f,
                                  0.115097329f,  -0.0440658554f, 0.201186404f,
                                  -0.272219867f, 0.139038861f,   -0.0260221642f};
      return horner(kTerms, t);
    } else {
      constexpr float kTerms[] = {0.103526808f,  0.107022382f, 0.0742388517f, 0.163741022f,
                                  -0.102363221f, 0.225860566f, -0.0720258653f};
      return horner(kTerms, t);
    }
  }

  // Phi(x), and exp(-x^2 / 2) as a by-product.
  static __device__ __forceinline__ float normal_cdf(float x, float* bell) {
    float t;
    if constexpr (kExact) {
      const float a = fminf(fabsf(x), 15.0f);  // Phi(-15) is no float32 number
      const float square = a * a, rest = fmaf(a, a, -square);
      *bell = expf(-0.5f * square);
      *bell = fmaf(*bell, -0.5f * rest, *bell);
      const float d = fmaf(a, kT, 1.0f), r = fast_reciprocal(d);
      t = fmaf(r, fmaf(-d, r, 1.0f), r);
    } else {
      *bell = exp2_approx(x * x * (-0.5f * kLog2E));
      t = fast_reciprocal(fmaf(fabsf(x), kT, 1.0f));
    }
    const float tail = polynomial(t) * t * *bell;
    return x > 0.0f ? 1.0f - tail : tail;
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
    float s;
    *value = sigmoid_times<kExact>(two_u(x), x, &s);
    const float two_du = fmaf(3.0f * kTwoBeta * kKappa * x, x, kTwoBeta);
    return fmaf(*value * (1.0f - s), two_du, s);
  }
};

}  // namespace tiercel

#endif  // KERNELS_ACTIVATION_FUNCTIONS_CUH_
