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

// kWarp: a warp has a row; else a block or a cluster.
template <typename Format, int kVectors, bool kLayer, bool kWarp>
__global__ void __launch_bounds__(norm_plain_threads(kVectors, kWarp),
                                  norm_plain_blocks(kVectors, kWarp))
    norm_plain(const __grid_constant__ NormForwardArgs args) {
  using Values = Chunk<Format, true>;
  constexpr int kElements = Values::kElements;
  const int places = kWarp ? 32 : blockDim.x, place = kWarp ? threadIdx.x % 32 : threadIdx.x;
  const int log2 = kWarp ? 0 : args.cluster_log2;
  const int rank = blockIdx.x & ((1 << log2) - 1);
  const int row =
      kWarp ? blockIdx.x * (kNormPlainWarpThreads / 32) + threadIdx.x / 32 : blockIdx.x >> log2;
  if (kWarp && row >= args.rows) return;
  const int first = rank * args.slice, behind = min(first + args.slice, args.columns);
  const auto column = [&](int v) { return first + (v * places + place) * kElements; };
  const auto each = [&](auto visit) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column(v) < behind) visit(v);
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
  each([&](int v) {
    read_packed<Format>(weights[v], args.weight, column(v), 1.0f);
    if constexpr (kLayer) read_packed<Format>(biases[v], args.bias, column(v), 0.0f);
  });
  __shared__ BlockScratch scratch;
  const BlockTeam team(rank, 1 << log2);
  if constexpr (!kWarp) team.start(scratch);

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
    const float4 part = distances.of_warp(count).about_mean();
    mean = part.z, square = part.y;
    if constexpr (!kWarp) {
      const float2 joined = team.join(scratch, part, args.inverse_columns);
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

  const RowStatistics statistics{mean, rstd};
  char* const out = args.out + int64_t{row} * args.out_stride;
  each([&](int v) {
    statistics.normalised<kLayer, Format>(values[v], weights[v], biases[v])
        .store(out + column(v) * Format::kBytes);
  });
}

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_PLAIN_CUH_
