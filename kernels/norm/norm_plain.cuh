// SPDX-License-Identifier: Apache-2.0
// The common calls: rms_norm with or without a residual, layer_norm without one; 16-byte aligned
// rows, parameters of x's type.
//
// Plan: as norm_forward, or one warp per row, in fewer instructions: at the memory's speed a
// multiprocessor has time for about 30 per 16-bit element. With few bytes the latency counts, from
// the end of the previous grid to the last store; so everything that needs no data is done before
// that grid ends.
//
// Lower bound: as norm_forward.
#ifndef KERNELS_NORM_NORM_PLAIN_CUH_
#define KERNELS_NORM_NORM_PLAIN_CUH_

#include "kernels/norm/moments.cuh"
#include "kernels/norm/parameters.cuh"
#include "kernels/norm/single_block_reduce.cuh"
#include "kernels/norm/teams.cuh"
#include "kernels/sm90/early_launch.h"

namespace tiercel {

// kWarp: one warp per row, else one block.
template <typename Format, int kVectors, bool kLayer, bool kWarp, bool kResidual>
__global__ void __launch_bounds__(norm_plain_threads(kVectors, kWarp),
                                  norm_plain_resident_blocks(kVectors, kWarp))
    norm_plain(const __grid_constant__ NormForwardArgs args) {
  using Values = Chunk<Format, true>;
  constexpr int kElements = Values::kElements;
  const int places = kWarp ? 32 : blockDim.x, place = kWarp ? threadIdx.x % 32 : threadIdx.x;
  const int row = kWarp ? blockIdx.x * (kNormPlainWarpThreads / 32) + threadIdx.x / 32 : blockIdx.x;
  if (kWarp && row >= args.rows) return;

  // Compute all addresses before the wait, so that the loads follow it at once.
  const int first = place * 16, step = places * 16;
  const char* x = args.x + row * args.x_stride + first;
  const char* residual = args.residual + row * args.residual_stride + first;
  const char* weight = args.weight == nullptr ? nullptr : args.weight + first;
  const char* bias = args.bias == nullptr ? nullptr : args.bias + first;
  char* out = args.out + row * args.out_stride + first;
  char* residual_out = args.residual_out + row * args.out_stride + first;
  int bytes =
      args.columns * Format::kBytes - first;  // left of the row from this thread's first vector on
  materialize_now(x, weight, out, bytes);
  if constexpr (kLayer) materialize_now(bias);
  if constexpr (kResidual) materialize_now(residual, residual_out);
  __builtin_assume(__isGlobal(out));
  if constexpr (kResidual) __builtin_assume(__isGlobal(residual_out));
  const auto each = [&](auto visit) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v * step < bytes) visit(v);
    }
  };

  if (static_cast<int>(blockIdx.x) < args.prefetch_blocks) {
    each([&](int v) {
      prefetch_l2(x + v * step);
      if constexpr (kResidual) prefetch_l2(residual + v * step);
    });
    if (row < kNormParametersAhead) {
      if (weight != nullptr) each([&](int v) { prefetch_l2(weight + v * step); });
      if (kLayer && bias != nullptr) each([&](int v) { prefetch_l2(bias + v * step); });
    }
  }
  using Block = SingleBlockReduce<kWarp ? 1 : norm_plain_threads(kVectors, kWarp) / 32>;
  __shared__ typename Block::Scratch scratch;
  const Block block(scratch);
  int elements = 0;  // this thread's
  each([&](int) { elements += kElements; });
  Count own(elements), warps = kLayer && !kWarp ? Count::of_warp(elements) : own;
  // A block with four vectors per thread has no registers left for these.
  if constexpr (kLayer && (kWarp || kVectors < 4)) materialize_now(own.number, own.inverse);
  if constexpr (kLayer && !kWarp && kVectors < 4) materialize_now(warps.number, warps.inverse);
  grid_dependency_wait_and_launch(args.early_launch);

  const auto read = [&](Values(&to)[kVectors], const char* from) {
    each([&](int v) { to[v].load(from + v * step); });
  };
  const auto read_or_fill = [&](Values(&to)[kVectors], const char* from, float absent) {
    if (from != nullptr) return read(to, from);
#pragma unroll
    for (Values& vector : to) vector.fill(absent);
  };
  Values values[kVectors], others[kVectors], weights[kVectors], biases[kVectors];
  read(values, x);
  if constexpr (kResidual) read(others, residual);
  read_or_fill(weights, weight, 1.0f);
  if constexpr (kLayer) read_or_fill(biases, bias, 0.0f);
  if constexpr (kResidual) {
    each([&](int v) {
      values[v].add(others[v]);
      values[v].store(residual_out + v * step);
    });
  }
  RowMoments row_moments = {};
  if constexpr (kLayer) {
    Distances<> distances;
    each([&](int v) {
      float f[kElements];
      values[v].unpack(f);
      if (v == 0) distances.measure_from(f[0]);
      distances.add(f);
    });
    const Moments moments = distances.of_warp(own);
    if constexpr (kWarp) {
      row_moments = moments.of_row(args.inverse_columns);
    } else {
      row_moments = block.join(moments.entry(warps), args.inverse_columns);
    }
  } else {
    float squares[2] = {};
    each([&](int v) {
      float f[kElements];
      values[v].unpack(f);
#pragma unroll
      for (int i = 0; i < kElements; ++i) squares[i % 2] = fmaf(f[i], f[i], squares[i % 2]);
    });
    const float square = lanes_reduce<32>(squares[0] + squares[1], Sum());
    row_moments.square = kWarp ? square : block.sum(square);
  }
  const float rstd = reciprocal_root(fmaf(row_moments.square, args.inverse_columns, args.eps));

  const Normaliser<Format, kLayer> normalised(row_moments, rstd);
  each([&](int v) { normalised(values[v], weights[v], biases[v]).store(out + v * step); });
}

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_PLAIN_CUH_
