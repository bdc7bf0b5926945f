// SPDX-License-Identifier: Apache-2.0
// softmax and log_softmax over rows, forward and backward, with scale and mask.
//
// The plan. Bound by bytes: forward reads and writes a row once, backward reads two and writes one.
// A group of threads holds a row in registers, kVectors 16-byte vectors a thread, so that nothing
// is read twice: 1 to 32 lanes of a warp (rows of up to 1024 16-bit scores), a block (32768), or a
// cluster of up to 8 blocks (262144). All loads are issued at once. Each warp takes the maximum m of
// its part and the sum s of exp(x - m) by shuffles; the pairs (m, s) of the warps are merged through
// shared memory and those of the blocks through distributed shared memory, one barrier each:
// (m, s) + (m', s') = (M, s exp(m - M) + s' exp(m' - M)), M = max(m, m'), Milakov and Gimelshein's
// online softmax (arXiv:1805.02867). Then exp(x - M) / S from the registers.
// Rows that do not start at a multiple of 16 bytes are read from the multiple before, their first
// and last vector element by element. Longer rows: softmax_long.cuh.
#ifndef KERNELS_SOFTMAX_SOFTMAX_CUH_
#define KERNELS_SOFTMAX_SOFTMAX_CUH_

#include <cstdint>

#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/softmax/row_group.cuh"
#include "kernels/softmax/rows.cuh"
#include "kernels/softmax/softmax_kernels.h"

namespace tiercel {

template <bool kExact>
__device__ __forceinline__ float exp_of(float x) {
  if constexpr (kExact) return expf(x);
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x * 1.44269504f));
  return value;
}

// Merges (maximum, sum of exponentials below it). A part without scores, (-inf, 0), counts nothing;
// when all are -inf the sum is NaN, as from torch.softmax.
template <bool kExact>
struct MergeSums {
  __device__ __forceinline__ float2 operator()(float2 a, float2 b) const {
    const float largest = fmaxf(a.x, b.x);
    const float below = fminf(a.x, b.x);
    // One of the factors is 1; the other's argument -inf - -inf must not make a NaN here.
    const float factor = below == -kInfinity ? 0.0f : exp_of<kExact>(below - largest);
    const bool first = a.x == largest;
    const float large = first ? a.y : b.y;
    const float small = first ? b.y : a.y;
    return {largest, below == -kInfinity ? large + small : fmaf(small, factor, large)};
  }
};

struct MergeFirst {
  __device__ __forceinline__ float2 operator()(float2 a, float2 b) const {
    return {a.x + b.x, 0.0f};
  }
};

// x / sum, in float32 results as exact as IEEE division but for rare last places.
template <bool kExact>
__device__ __forceinline__ float share(float x, float sum, float inverse) {
  const float q = x * inverse;
  return kExact ? fmaf(fmaf(-sum, q, x), inverse, q) : q;
}

// A vector's scores: scaled and masked.
template <bool kMasked, typename Format, typename Group>
__device__ __forceinline__ void scores_of(const uint32_t (&words)[4],
                                          float (&x)[RowPlace<Format, Group>::kPerVector],
                                          const SoftmaxArgs& args, const char* mask,
                                          const RowPlace<Format, Group>& place, int v) {
  unpack<Format>(words, x);
#pragma unroll
  for (int i = 0; i < RowPlace<Format, Group>::kPerVector; ++i) x[i] *= args.scale;
  if constexpr (kMasked) apply_mask<Format>(x, args.mask, mask, place, v);
}

// A vector's results, in the scores' place; `total` is (maximum, sum) of the whole row.
template <typename Format, int kPerVector>
__device__ __forceinline__ void finish(float (&x)[kPerVector], float2 total, float last, bool log) {
  constexpr bool kExact = Format::kBytes == 4;
#pragma unroll
  for (int i = 0; i < kPerVector; ++i) {
    const float below = x[i] - total.x;
    x[i] = log ? below - last : share<kExact>(exp_of<kExact>(below), total.y, last);
  }
}

// What `finish` wants once a row: the sum's logarithm or its reciprocal.
__device__ __forceinline__ float last_factor(float sum, bool log) {
  return log ? logf(sum) : 1.0f / sum;
}

template <typename Format, typename Group, int kVectors, bool kMasked, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads, 1)
    softmax_forward(const __grid_constant__ SoftmaxArgs args) {
  constexpr bool kExact = Format::kBytes == 4;
  constexpr int kPerVector = RowPlace<Format, Group>::kPerVector;
  const Group group(args.blocks);
  grid_dependency_wait();

  const RowPlace<Format, Group> place(args, group);
  uint32_t words[kVectors][4];
  load_row(words, place, args.x, args.pad);
  grid_dependency_launch();
  const char* mask = kMasked ? mask_row(args.mask, place.row) : nullptr;
  float x[kVectors][kPerVector];
  float largest = -kInfinity;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    scores_of<kMasked>(words[v], x[v], args, mask, place, v);
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) largest = fmaxf(largest, x[v][i]);
  }
  largest = group.near(largest, [](float a, float b) { return fmaxf(a, b); });
  const float base = largest == -kInfinity ? 0.0f : largest;
  float sums[4] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) sums[i % 4] += exp_of<kExact>(x[v][i] - base);
  }
  const float sum = group.near((sums[0] + sums[1]) + (sums[2] + sums[3]), Sum());
  const float2 total =
      group.far(make_float2(largest, sum), make_float2(-kInfinity, 0.0f), MergeSums<kExact>());

  const float last = last_factor(total.y, args.log);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    finish<Format>(x[v], total, last, args.log);
    store_row<Format>(x[v], place, args.out, v);
  }
}

// A vector's gradients, in the place of its results y. A score that the mask took out has none, not
// even NaN.
template <bool kMasked, typename Format, typename Group>
__device__ __forceinline__ void gradients(float (&y)[RowPlace<Format, Group>::kPerVector],
                                          const float (&grad)[RowPlace<Format, Group>::kPerVector],
                                          float total, const SoftmaxArgs& args, const char* mask,
                                          const RowPlace<Format, Group>& place, int v) {
  constexpr bool kExact = Format::kBytes == 4;
  uint32_t keep = ~0u;
  if constexpr (kMasked) keep = mask_bits(args.mask, mask, place, v);
#pragma unroll
  for (int i = 0; i < RowPlace<Format, Group>::kPerVector; ++i) {
    const float score_grad =
        args.log ? fmaf(-exp_of<kExact>(y[i]), total, grad[i]) : y[i] * (grad[i] - total);
    y[i] = !kMasked || (keep >> i & 1) ? score_grad * args.scale : 0.0f;
  }
}

// softmax: y (g - sum(g y)); log_softmax: g - exp(y) sum(g); times the scale.
template <typename Format, typename Group, int kVectors, bool kMasked, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads, 1)
    softmax_backward(const __grid_constant__ SoftmaxArgs args) {
  constexpr int kPerVector = RowPlace<Format, Group>::kPerVector;
  const Group group(args.blocks);
  grid_dependency_wait();

  const RowPlace<Format, Group> place(args, group);
  uint32_t y_words[kVectors][4], grad_words[kVectors][4];
  load_row(y_words, place, args.x, 0.0f);
  load_row(grad_words, place, args.grad, 0.0f);
  grid_dependency_launch();
  float sums[4] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float y[kPerVector], grad[kPerVector];
    unpack<Format>(y_words[v], y);
    unpack<Format>(grad_words[v], grad);
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) {
      sums[i % 4] = args.log ? sums[i % 4] + grad[i] : fmaf(grad[i], y[i], sums[i % 4]);
    }
  }
  const float sum = group.near((sums[0] + sums[1]) + (sums[2] + sums[3]), Sum());
  const float total = group.far(make_float2(sum, 0.0f), make_float2(0.0f, 0.0f), MergeFirst()).x;
  const char* mask = kMasked ? mask_row(args.mask, place.row) : nullptr;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float y[kPerVector], grad[kPerVector];
    unpack<Format>(y_words[v], y);
    unpack<Format>(grad_words[v], grad);
    gradients<kMasked>(y, grad, total, args, mask, place, v);
    store_row<Format>(y, place, args.out, v);
  }
}

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_SOFTMAX_CUH_
