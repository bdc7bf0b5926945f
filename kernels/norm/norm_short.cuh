// SPDX-License-Identifier: Apache-2.0
// rms_norm and layer_norm of short rows.
//
// Plan: kLanes lanes of a warp work on kRows rows at once, with kVectors vectors of each row per
// lane in registers. Several rows per thread pay once for addresses and parameters, which dominate
// rows of one or two vectors per lane. kAny: both norms and parameters of any type
// (NormSpecialization::kBoth); else the norm that kLayer names.
//
// Lower bound: as norm_forward.
#ifndef KERNELS_NORM_NORM_SHORT_CUH_
#define KERNELS_NORM_NORM_SHORT_CUH_

#include "kernels/norm/moments.cuh"
#include "kernels/norm/parameters.cuh"
#include "kernels/norm/row_sums.cuh"
#include "kernels/sm90/early_launch.h"

namespace tiercel {

template <typename Format, bool kAligned16, int kLanes, int kVectors, int kRows, bool kResidual,
          bool kAny, bool kLayer>
__global__ void __launch_bounds__(norm_short_threads(kVectors, kRows),
                                  norm_short_resident_blocks(kVectors, kRows, kAny))
    norm_short(const __grid_constant__ NormForwardArgs args) {
  using Values = Chunk<Format, kAligned16>;
  constexpr int kElements = Values::kElements;
  // Parameters have x's type.
  constexpr bool kPacked = !kAny || Format::kBytes == 4;
  // Read one or two vectors of the parameters together with x; more would leave registers for fewer
  // rows.
  constexpr bool kEarly = kAligned16 && kVectors <= 2;
  constexpr bool kCentred = kAny || kLayer;
  constexpr int kGroups = norm_short_threads(kVectors, kRows) / kLanes;
  const int place = threadIdx.x % kLanes;
  const int row = blockIdx.x * (kGroups * kRows) + threadIdx.x / kLanes;
  const auto column = [&](int v) { return (v * kLanes + place) * kElements; };
  const auto inside = [&](int v) { return column(v) < args.columns; };
  const int last =
      min(kLanes, (args.columns + kElements - 1) / kElements) - 1;  // the last lane with elements
  const auto real = [&](int r) { return row + r * kGroups < args.rows; };
  // Compute all addresses before the wait, so that the loads follow it at once.
  const auto rows_of = [&](auto*(&rows)[kRows], auto* first, int64_t stride, int64_t inner) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows[r] = first + (row + r * kGroups) * stride + column(0) * inner;
      materialize_now(rows[r]);
      __builtin_assume(__isGlobal(rows[r]));
    }
  };
  const int64_t x_inner = kAligned16 ? Format::kBytes : args.x_inner;
  const int64_t residual_inner = kAligned16 ? Format::kBytes : args.residual_inner;
  const char *x[kRows], *residual[kRows];
  char *out[kRows], *residual_out[kRows];
  rows_of(x, args.x, args.x_stride, x_inner);
  rows_of(out, args.out, args.out_stride, Format::kBytes);
  if constexpr (kResidual) {
    rows_of(residual, args.residual, args.residual_stride, residual_inner);
    rows_of(residual_out, args.residual_out, args.out_stride, Format::kBytes);
  }
  const auto each = [&](auto visit) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) visit(r, v, inside(v) && real(r));
    }
  };
  const auto at = [&](auto* first, int64_t inner, int v) {
    return first + v * (kLanes * kElements) * inner;
  };

  if (kAligned16 && static_cast<int>(blockIdx.x) < args.prefetch_blocks) {
    each([&](int r, int v, bool valid) {
      if (!valid) return;
      prefetch_l2(at(x[r], x_inner, v));
      if constexpr (kResidual) prefetch_l2(at(residual[r], residual_inner, v));
      if (row < kNormParametersAhead && r == 0) prefetch_parameters<Format>(args, column(v));
    });
  }
  grid_dependency_wait_and_launch(args.early_launch);

  Values values[kRows][kVectors];
  each([&](int r, int v, bool valid) {
    values[r][v].clear();
    if (valid) values[r][v].load(at(x[r], x_inner, v));
  });
  Values others[kResidual ? kRows : 1][kVectors];
  if constexpr (kResidual) {
    each([&](int r, int v, bool valid) {
      others[r][v].clear();
      if (valid) others[r][v].load(at(residual[r], residual_inner, v));
    });
  }
  Values weights[kVectors], biases[kVectors];
  const bool has_weight = args.weight != nullptr;
  const bool has_bias = kCentred && args.bias != nullptr;
  const bool weight_packed = has_weight && (kPacked || !args.weight_float32);
  const bool bias_packed = has_bias && (kPacked || !args.bias_float32);
  const auto read_packed = [&](int v) {
    if (!inside(v)) return;
    if (weight_packed) weights[v].load_any(args.weight + column(v) * Format::kBytes);
    if (bias_packed) biases[v].load_any(args.bias + column(v) * Format::kBytes);
    if (!kAny && !has_weight) weights[v].fill(1.0f);
    if (!kAny && !has_bias) biases[v].fill(0.0f);
  };
#pragma unroll
  for (int v = 0; kEarly && v < kVectors; ++v) read_packed(v);
  if constexpr (kResidual) {
    each([&](int r, int v, bool valid) {
      float a[kElements], b[kElements];
      values[r][v].unpack(a);
      others[r][v].unpack(b);
#pragma unroll
      for (int i = 0; i < kElements; ++i) a[i] += b[i];
      values[r][v].pack(a);
      if (valid) values[r][v].store(at(residual_out[r], Format::kBytes, v));
    });
  }

  // A layer norm sums distances from one of the row's own values, so little cancels.
  float abouts[kRows], apart = 0.0f, square;  // `square`: of row number lane % kRows
  if (kAny ? args.layer_norm : kLayer) {
    float sums[2 * kRows] = {};  // distances, then their squares
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float f[kElements];
      values[r][0].unpack(f);
      const auto of_lane = [&](int lane) { return __shfl_sync(kFullWarp, f[0], lane, kLanes); };
      abouts[r] = middle_of(of_lane(0), of_lane(last / 2), of_lane(last));
    }
    each([&](int r, int v, bool) {
      float f[kElements], sum = 0.0f, square = 0.0f;
      values[r][v].unpack(f);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const float distance = kAligned16 || inside(v) ? f[i] - abouts[r] : 0.0f;
        sum += distance;
        square = fmaf(distance, distance, square);
      }
      sums[r] += !kAligned16 || inside(v) ? sum : 0.0f;  // padding zeros are not distances
      sums[kRows + r] += !kAligned16 || inside(v) ? square : 0.0f;
    });
    const float held = lanes_scatter(sums, kLanes);
    const float other = __shfl_xor_sync(kFullWarp, held, kRows);
    const bool squares = threadIdx.x & kRows;
    const Moments all = {0.0f, squares ? other : held, squares ? held : other};
    const RowMoments moments = all.of_row(args.inverse_columns);
    apart = moments.apart, square = moments.square;
  } else {
    float squares[kRows] = {};
    each([&](int r, int v, bool) {
      float f[kElements];
      values[r][v].unpack(f);
#pragma unroll
      for (int i = 0; i < kElements; ++i) squares[r] = fmaf(f[i], f[i], squares[r]);
    });
#pragma unroll
    for (int r = 0; r < kRows; ++r) abouts[r] = 0.0f;
    square = lanes_scatter(squares, kLanes);
  }
  const float held = reciprocal_root(fmaf(square, args.inverse_columns, args.eps));
  const float held_shift = -apart * held;

  each([&](int r, int v, bool valid) {
    if (!kEarly && r == 0) read_packed(v);
    const float rstd = __shfl_sync(kFullWarp, held, r, kLanes);
    const float shift = kCentred ? __shfl_sync(kFullWarp, held_shift, r, kLanes) : 0.0f;
    if constexpr (!kAny) {
      const Normaliser<Format, kLayer> normalised(abouts[r], rstd, shift);
      if (!valid) return;
      normalised(values[r][v], weights[v], biases[v]).store(at(out[r], Format::kBytes, v));
      return;
    }
    float f[kElements];
    values[r][v].drop_unpacked_copies();
    values[r][v].unpack(f);
#pragma unroll
    for (int i = 0; i < kElements; ++i) f[i] = fmaf(f[i] - abouts[r], rstd, shift);
    if (has_weight) {
      float w[kElements];
      if (kPacked || weight_packed) {
        weights[v].unpack(w);
      } else if (inside(v)) {
        read_parameter<Format, kAligned16>(w, args.weight, true, column(v));
      }
#pragma unroll
      for (int i = 0; i < kElements; ++i) f[i] *= w[i];
    }
    if (has_bias) {
      float b[kElements];
      if (kPacked || bias_packed) {
        biases[v].unpack(b);
      } else if (inside(v)) {
        read_parameter<Format, kAligned16>(b, args.bias, true, column(v));
      }
#pragma unroll
      for (int i = 0; i < kElements; ++i) f[i] += b[i];
    }
    if (!valid) return;
    Values result;
    result.pack(f);
    result.store(at(out[r], Format::kBytes, v));
  });
}

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_SHORT_CUH_
