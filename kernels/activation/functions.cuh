// SPDX-License-Identifier: Apache-2.0
// The activations and their derivatives in float32, each in two forms: `kExact` with a relative
// error of about 2^-22 (for float32 results), otherwise of about 2^-19 with few instructions (for
// results of at most 11 bits, where a streaming kernel has about 27 instruction slots per element).
// Both hold wherever the value is a normal float32 number, in the tails too: powers that would
// overflow or be flushed to 0 are scaled, and no value is the difference of two numbers near 1.
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

// x / d for 1 <= d < 2^126; differs from IEEE division rarely, in the last place.
__device__ __forceinline__ float quotient(float x, float d) {
  const float r = fast_reciprocal(d);
  const float q = x * r;
  const float rest = fmaf(-d, q, x);
  return rest == rest ? fmaf(rest, r, q) : q;  // NaN where x is infinite
}

// x * sigmoid(z); also stores sigmoid(z) if `sigmoid` is not null.
template <bool kExact>
__device__ __forceinline__ float sigmoid_times(float z, float x, float* sigmoid = nullptr) {
  if constexpr (kExact) {
    // For z < -kFar, 1 + exp(-z) is too large for a reciprocal, but exp(z) equals the sigmoid. It
    // is computed as exp(z + kFar) * exp(-kFar); kFar is chosen so that exp(-kFar) is nearly a
    // float.
    constexpr float kFar = 0x1.fd5498p+5f, kFarPower = 0x1.1bd72cp-92f;  // 63.666...
    const bool far = z < -kFar;
    const float power = expf(far ? z + kFar : -z);
    const float d = 1.0f + power;
    if (sigmoid != nullptr) *sigmoid = far ? power * kFarPower : quotient(1.0f, d);
    return far ? x * power * kFarPower : quotient(x, d);
  } else {
    // Computes 2^16 * sigmoid, so that the reciprocal is finite and the value not subnormal for all
    // z whose sigmoid is not 0 in bfloat16. x * 2^-16 is exact, also for bfloat16's smallest
    // numbers.
    constexpr float kScale = 0x1p-16f;
    const float scaled = fast_reciprocal(exp2_approx(fmaf(z, -kLog2E, -16.0f)) + kScale);
    if (sigmoid != nullptr) *sigmoid = scaled * kScale;
    return x * kScale * scaled;
  }
}

// The polynomial with these coefficients, the constant first.
template <int kCount>
__device__ __forceinline__ float horner(const float (&terms)[kCount], float x) {
  float value = terms[kCount - 1];
#pragma unroll
  for (int i = kCount - 2; i >= 0; --i) value = fmaf(x, value, terms[i]);
  return value;
}

// Every activation has value(x) and its derivative slope(x, &value). NaN gives NaN; infinities give
// PyTorch's results.
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

// x * Phi(x), with the error function.
template <bool kExact>
struct Gelu {
  // Phi(-a) / exp(-a^2 / 2) for a >= 0 as t * polynomial(t), t = 1 / (1 + kT * a), fitted to the
  // least relative error on [0, 14.2]: 3.2e-8, or 1.1e-6 with two terms fewer. (Abramowitz and
  // Stegun's 7.1.26 has this form, but an absolute error of 1.5e-7: 3.6 % off at Phi(-12.5).)
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

  // Phi(x); also yields exp(-x^2 / 2).
  static __device__ __forceinline__ float normal_cdf(float x, float* bell) {
    float t;
    if constexpr (kExact) {
      const float a = fminf(fabsf(x), 15.0f);  // Phi(-15) is below float32's range
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

// With tanh: 0.5 x (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
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
