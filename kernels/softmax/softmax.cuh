// SPDX-License-Identifier: Apache-2.0
// softmax and log_softmax over rows, forward and backward, with scale and mask.
//
// The plan. Bound by bytes: forward reads and writes a row once, backward reads two and writes one.
// A group of threads holds a row in registers, kVectors 16-byte vectors a thread, so that nothing
// is read twice: 1 to 32 lanes of a warp (rows of up to 1024 16-bit scores), a block (32768), or a
// cluster of up to 8 blocks (262144). All loads are issued at once. Each warp takes the maximum m
// of its part and the sum s of exp(x - m) by shuffles; the pairs (m, s) of the warps are merged
// through shared memory and those of the blocks through distributed shared memory, one barrier
// each: (m, s) + (m', s') = (M, s exp(m - M) + s' exp(m' - M)), M = max(m, m'), Milakov and
// Gimelshein's online softmax (arXiv:1805.02867). Then exp(x - M) / S from the registers. Rows that
// do not start at a multiple of 16 bytes are read from the multiple before, their first and last
// vector element by element. Longer rows: softmax_long.cuh.
#ifndef KERNELS_SOFTMAX_SOFTMAX_CUH_
#define KERNELS_SOFTMAX_SOFTMAX_CUH_

#include <cstdint>

#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/softmax/row_group.cuh"
#include "kernels/softmax/softmax_kernels.h"

namespace tiercel {

inline constexpr float kInfinity = __builtin_huge_valf();

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

// A row's place in its matrices, as a group's thread sees it.
template <typename Format, typename Group>
struct RowPlace {
  static constexpr int kPerVector = kSoftmaxVectorBytes / Format::kBytes;

  int64_t row;
  int first;    // column of the thread's first vector, perhaps negative
  int stride;   // columns to its next one
  int columns;  // 0 behind the last row
  bool vectors;

  __device__ __forceinline__ RowPlace(const SoftmaxArgs& args, const Group& group)
      : row(group.row()),
        stride(group.size() * kPerVector),
        columns(row < args.rows ? args.columns : 0),
        vectors(args.vectors) {
    const uint64_t address = reinterpret_cast<uint64_t>(args.x.data + row * args.x.row_stride);
    const int shift = static_cast<int>(address % kSoftmaxVectorBytes) / Format::kBytes;
    first = group.rank() * kPerVector - (vectors ? shift : 0);
  }

  __device__ __forceinline__ int column(int v) const { return first + v * stride; }
  __device__ __forceinline__ bool whole(int v) const {
    return vectors && column(v) >= 0 && column(v) <= columns - kPerVector;
  }
  __device__ __forceinline__ bool has(int v, int i) const {
    return static_cast<unsigned>(column(v) + i) < static_cast<unsigned>(columns);
  }
  // The thread's first vector in a matrix; its next ones are `stride` columns apart.
  __device__ __forceinline__ char* base(const SoftmaxRows& rows) const {
    return rows.data + row * rows.row_stride + static_cast<int64_t>(first) * Format::kBytes;
  }
  __device__ __forceinline__ int offset(int v, int i = 0) const {
    return (v * stride + i) * Format::kBytes;
  }
};

// A thread's vectors of a row, as words; `pad` stands where the row has no element.
template <typename Format, typename Group, int kVectors>
__device__ __forceinline__ void load_row(uint32_t (&words)[kVectors][4],
                                         const RowPlace<Format, Group>& place,
                                         const SoftmaxRows& rows, float pad) {
  constexpr int kPerVector = RowPlace<Format, Group>::kPerVector;
  const char* base = place.base(rows);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (place.whole(v)) {
      load_vector_once(words[v], base + place.offset(v));
    } else {
      float values[kPerVector];
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) {
        values[i] = place.has(v, i) ? load_element<Format>(base + place.offset(v, i)) : pad;
      }
      pack<Format>(values, words[v]);
    }
  }
}

template <typename Format, typename Group>
__device__ __forceinline__ void store_row(
    const float (&values)[RowPlace<Format, Group>::kPerVector],
    const RowPlace<Format, Group>& place, const SoftmaxRows& rows, int v) {
  constexpr int kPerVector = RowPlace<Format, Group>::kPerVector;
  char* base = place.base(rows);
  if (place.whole(v)) {
    uint32_t words[4];
    pack<Format>(values, words);
    store_vector(base + place.offset(v), words);
  } else {
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) {
      if (place.has(v, i)) store_element<Format>(base + place.offset(v, i), values[i]);
    }
  }
}

__device__ __forceinline__ const char* mask_row(const SoftmaxMaskRows& mask, int64_t row) {
  const int64_t outer = row / mask.sizes[1];
  const int64_t inner = row - outer * mask.sizes[1];
  const int64_t most = outer / mask.sizes[0];
  return mask.data + most * mask.strides[0] + (outer - most * mask.sizes[0]) * mask.strides[1] +
         inner * mask.strides[2];
}

// What the mask makes of a scaled score.
template <typename Format>
__device__ __forceinline__ float masked(float score, const SoftmaxMaskRows& mask,
                                        const char* mask_row, int64_t column) {
  const char* address = mask_row + column * mask.step;
  if (mask.kind == SoftmaxMask::kKeep) {
    return *reinterpret_cast<const uint8_t*>(address) ? score : -kInfinity;
  }
  return score + (mask.kind == SoftmaxMask::kAddFloat32 ? load_element<Float32>(address)
                                                        : load_element<Format>(address));
}

// x / sum, in float32 results as exact as IEEE division but for rare last places.
template <bool kExact>
__device__ __forceinline__ float share(float x, float sum, float inverse) {
  const float q = x * inverse;
  return kExact ? fmaf(fmaf(-sum, q, x), inverse, q) : q;
}

template <typename Format, typename Group, int kVectors, bool kMasked, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads)
    softmax_forward(const __grid_constant__ SoftmaxArgs args) {
  constexpr bool kExact = Format::kBytes == 4;
  constexpr int kPerVector = RowPlace<Format, Group>::kPerVector;
  const Group group(args.blocks);
  grid_dependency_wait();

  const RowPlace<Format, Group> place(args, group);
  uint32_t words[kVectors][4];
  load_row(words, place, args.x, args.pad);
  grid_dependency_launch();
  float x[kVectors][kPerVector];
  float largest = -kInfinity;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    unpack<Format>(words[v], x[v]);
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) {
      x[v][i] *= args.scale;
      if constexpr (kMasked) {
        if (place.has(v, i)) {
          x[v][i] = masked<Format>(x[v][i], args.mask, mask_row(args.mask, place.row),
                                   place.column(v) + i);
        } else {
          x[v][i] = -kInfinity;
        }
      }
      largest = fmaxf(largest, x[v][i]);
    }
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

  // An empty softmax, all -inf, is NaN: 0 / 0.
  const float offset = total.x == -kInfinity ? 0.0f : total.x;
  if (args.log) {
    const float log_sum = logf(total.y);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) x[v][i] = x[v][i] - total.x - log_sum;
      store_row<Format>(x[v], place, args.out, v);
    }
  } else {
    const float inverse = 1.0f / total.y;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) {
        x[v][i] = share<kExact>(exp_of<kExact>(x[v][i] - offset), total.y, inverse);
      }
      store_row<Format>(x[v], place, args.out, v);
    }
  }
}

// softmax: y (g - sum(g y)); log_softmax: g - exp(y) sum(g); times the scale.
template <typename Format, typename Group, int kVectors, bool kMasked, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads)
    softmax_backward(const __grid_constant__ SoftmaxArgs args) {
  constexpr bool kExact = Format::kBytes == 4;
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
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float y[kPerVector], grad[kPerVector];
    unpack<Format>(y_words[v], y);
    unpack<Format>(grad_words[v], grad);
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) {
      const float score_grad =
          args.log ? fmaf(-exp_of<kExact>(y[i]), total, grad[i]) : y[i] * (grad[i] - total);
      y[i] = score_grad * args.scale;
      if constexpr (kMasked) {  // a score that the mask took out has no gradient, not even NaN
        if (place.has(v, i) &&
            !mask_row(args.mask, place.row)[(place.column(v) + i) * args.mask.step]) {
          y[i] = 0.0f;
        }
      }
    }
    store_row<Format>(y, place, args.out, v);
  }
}

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_SOFTMAX_CUH_
