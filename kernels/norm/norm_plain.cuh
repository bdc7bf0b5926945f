// SPDX-License-Identifier: Apache-2.0
// rms_norm and layer_norm as most calls are: rows on 16 bytes, parameters of x's type, nothing
// added before. As norm_forward, or with a row a warp, in fewer instructions: at the memory's speed
// a multiprocessor has time for about 30 of them an element of 16 bits.
#ifndef KERNELS_NORM_NORM_PLAIN_CUH_
#define KERNELS_NORM_NORM_PLAIN_CUH_

#include "kernels/norm/moments.cuh"
#include "kernels/norm/parameters.cuh"
#include "kernels/norm/teams.cuh"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {

// kWarp: a warp has a row, else a block.
template <typename Format, int kVectors, bool kLayer, bool kWarp>
__global__ void __launch_bounds__(norm_plain_threads(kVectors, kWarp),
                                  norm_plain_blocks(kVectors, kWarp))
    norm_plain(const __grid_constant__ NormForwardArgs args) {
  using Values = Chunk<Format, true>;
  constexpr int kElements = Values::kElements;
  const int places = kWarp ? 32 : blockDim.x, place = kWarp ? threadIdx.x % 32 : threadIdx.x;
  const int row = kWarp ? blockIdx.x * (kNormPlainWarpThreads / 32) + threadIdx.x / 32 : blockIdx.x;
  if (kWarp && row >= args.rows) return;
  const auto column = [&](int v) { return (v * places + place) * kElements; };
  const auto each = [&](auto visit) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column(v) < args.columns) visit(v);
    }
  };

  const char* const x = args.x + int64_t{row} * args.x_stride;
  if (static_cast<int>(blockIdx.x) < args.ahead) {
    each([&](int v) {
      prefetch_l2(x + column(v) * Format::kBytes);
      if (row < kNormParametersAhead) prefetch_parameters<Format>(args, column(v));
    });
  }
  grid_dependency_wait();
  grid_dependency_launch();

  Values values[kVectors], weights[kVectors], biases[kVectors];
  each([&](int v) { values[v].load(x + column(v) * Format::kBytes); });
  const auto read = [&](Values(&to)[kVectors], const char* from, float absent) {
    if (from == nullptr) {
#pragma unroll
      for (Values& vector : to) vector.fill(absent);
    } else {
      each([&](int v) { to[v].load(from + column(v) * Format::kBytes); });
    }
  };
  read(weights, args.weight, 1.0f);
  if constexpr (kLayer) read(biases, args.bias, 0.0f);
  __shared__ BlockScratch scratch;
  const BlockTeam team(0, 1);

  float mean = 0.0f, square = 0.0f;
  if constexpr (kLayer) {
    Distances<> distances;
    int count = 0;
    each([&](int v) {
      float f[kElements];
      values[v].unpack(f);
      if (v == 0) distances.measure_from(f[0]);
      distances.add(f);
      count += kElements;
    });
    const Moments moments = distances.of_warp(count);
    if constexpr (kWarp) {
      mean = moments.mean(args.inverse_columns);
      square = moments.about_mean(args.inverse_columns);
    } else {
      const float2 joined = team.join(scratch, moments.entry(count), args.inverse_columns);
      mean = joined.x, square = joined.y;
    }
  } else {
    each([&](int v) {
      float f[kElements];
      values[v].unpack(f);
#pragma unroll
      for (int i = 0; i < kElements; ++i) square += f[i] * f[i];
    });
    square = lanes_reduce<32>(square, Sum());
    if constexpr (!kWarp) square = team.sum(scratch, square);
  }
  const float rstd = reciprocal_root(fmaf(square, args.inverse_columns, args.eps));

  const Normaliser<Format, kLayer> normalised(mean, rstd);
  char* const out = args.out + int64_t{row} * args.out_stride;
  each([&](int v) {
    normalised(values[v], weights[v], biases[v]).store(out + column(v) * Format::kBytes);
  });
}

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_PLAIN_CUH_
