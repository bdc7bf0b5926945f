// SPDX-License-Identifier: Apache-2.0
// Scores of logits: sigmoid, root of softplus, and the quotients of a softmax.
#ifndef KERNELS_ROUTING_ROUTE_SCORES_CUH_
#define KERNELS_ROUTING_ROUTE_SCORES_CUH_

#include <cstdint>

#include "kernels/routing/topk_route.h"

namespace tiercel {

// The functions below are sequences of IEEE operations without contraction, which the reference
// repeats: so a bias gives the same choice on every device. They take arrays and finish one step
// for all elements before the next one, so that the elements' chains overlap: a warp alone waits 4
// cycles and more for each result.

// Calls step(i) for each of kCount elements.
template <int kCount, typename Step>
__device__ __forceinline__ void for_all(const Step& step) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) step(i);
}

// a = a / b for a = 0 or a >= 2^-102 and b from 2^-67 to 2^67, correctly rounded: the operator's
// own sequence without its branch for other numbers, which costs registers.
template <int kCount>
__device__ __forceinline__ void divide(float (&a)[kCount], const float (&b)[kCount]) {
  float y[kCount], q[kCount], t[kCount];
  for_all<kCount>([&](int i) { asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y[i]) : "f"(b[i])); });
  for_all<kCount>([&](int i) { t[i] = fmaf(-b[i], y[i], 1.0f); });
  for_all<kCount>([&](int i) { y[i] = fmaf(t[i], y[i], y[i]); });
  for_all<kCount>([&](int i) { q[i] = __fmul_rn(a[i], y[i]); });
  for_all<kCount>([&](int i) { t[i] = fmaf(-b[i], q[i], a[i]); });
  for_all<kCount>([&](int i) { q[i] = fmaf(t[i], y[i], q[i]); });
  for_all<kCount>([&](int i) { t[i] = fmaf(-b[i], q[i], a[i]); });
  for_all<kCount>([&](int i) { a[i] = fmaf(t[i], y[i], q[i]); });
}
__device__ __forceinline__ float divided(float a, float b) {
  float quotient[1] = {a};
  divide(quotient, {b});
  return quotient[0];
}

// The root of a number in the same range, likewise.
__device__ __forceinline__ float root(float a) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(a));
  const float s = __fmul_rn(a, y);
  const float result = fmaf(fmaf(-s, s, a), __fmul_rn(y, 0.5f), s);
  return a == 0.0f || a == __builtin_huge_valf() ? a : result;
}

// x = exp(x) for x <= 0, to 2 units in the last place; 0 below -69.
template <int kCount>
__device__ __forceinline__ void exp_of_negative(float (&x)[kCount]) {
  constexpr float kTerms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                              1.6666665459e-1f, 5.0000001201e-1f};
  float n[kCount], r[kCount], p[kCount];
  for_all<kCount>([&](int i) { n[i] = rintf(__fmul_rn(x[i], 1.44269504f)); });
  for_all<kCount>([&](int i) { r[i] = __fsub_rn(x[i], __fmul_rn(n[i], 0.693359375f)); });
  for_all<kCount>([&](int i) { r[i] = __fsub_rn(r[i], __fmul_rn(n[i], -2.12194440e-4f)); });
  for_all<kCount>([&](int i) { p[i] = 1.9875691500e-4f; });
#pragma unroll
  for (const float term : kTerms) {
    for_all<kCount>([&](int i) { p[i] = __fmul_rn(p[i], r[i]); });
    for_all<kCount>([&](int i) { p[i] = __fadd_rn(p[i], term); });
  }
  for_all<kCount>([&](int i) { p[i] = __fmul_rn(p[i], r[i]); });
  for_all<kCount>([&](int i) { p[i] = __fmul_rn(p[i], r[i]); });
  for_all<kCount>([&](int i) { p[i] = __fadd_rn(p[i], r[i]); });
  for_all<kCount>([&](int i) { p[i] = __fadd_rn(p[i], 1.0f); });
  for_all<kCount>([&](int i) {
    p[i] = __fmul_rn(p[i], __int_as_float((__float2int_rn(n[i]) + 127) << 23));
    x[i] = x[i] < -69.0f ? 0.0f : p[i];
  });
}
__device__ __forceinline__ float exp_of_negative(float x) {
  float result[1] = {x};
  exp_of_negative(result);
  return result[0];
}

// log(1 + e) for e from 0 to 1, of z = e / (e + 2).
__device__ __forceinline__ float log_of_quotient(float z) {
  const float s = __fmul_rn(z, z);
  float p = 1.0f / 15;
  p = __fadd_rn(__fmul_rn(p, s), 1.0f / 13);
  p = __fadd_rn(__fmul_rn(p, s), 1.0f / 11);
  p = __fadd_rn(__fmul_rn(p, s), 1.0f / 9);
  p = __fadd_rn(__fmul_rn(p, s), 1.0f / 7);
  p = __fadd_rn(__fmul_rn(p, s), 1.0f / 5);
  p = __fadd_rn(__fmul_rn(p, s), 1.0f / 3);
  const float twice = __fadd_rn(z, z);
  return __fadd_rn(__fmul_rn(__fmul_rn(twice, s), p), twice);
}

// x = sigmoid(x), sqrt(softplus(x)), or exp(x - largest) / sum: an exponential and a quotient each,
// which they share, so that there is less code.
template <int kCount>
__device__ __forceinline__ void activate(float (&x)[kCount], TopkScoring scoring, float largest,
                                         float sum) {
  const bool softmax = scoring == TopkScoring::kSoftmax;
  const bool sigmoid = scoring == TopkScoring::kSigmoid;
  float e[kCount], below[kCount];
  for_all<kCount>([&](int i) { e[i] = softmax ? __fsub_rn(x[i], largest) : -fabsf(x[i]); });
  exp_of_negative(e);
  for_all<kCount>([&](int i) {
    below[i] = softmax ? sum : __fadd_rn(e[i], sigmoid ? 1.0f : 2.0f);
    e[i] = sigmoid && !(x[i] < 0.0f) ? 1.0f : e[i];
  });
  divide(e, below);
  if (softmax || sigmoid) {
    for_all<kCount>([&](int i) { x[i] = e[i]; });
  } else {
    for_all<kCount>(
        [&](int i) { x[i] = root(__fadd_rn(x[i] < 0.0f ? 0.0f : x[i], log_of_quotient(e[i]))); });
  }
}
__device__ __forceinline__ float activated(float x, TopkScoring scoring) {
  float score[1] = {x};
  activate(score, scoring, 0.0f, 1.0f);
  return score[0];
}

}  // namespace tiercel

#endif  // KERNELS_ROUTING_ROUTE_SCORES_CUH_
