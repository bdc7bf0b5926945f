// SPDX-License-Identifier: Apache-2.0
// rms_norm and layer_norm with one block, or one cluster of blocks, per row.
//
// Plan: each thread holds kVectors vectors of its row in registers, so x is read once. Blocks take
// rows in order, so DRAM accesses stay sequential.
//
// Lower bound: x (and residual) read once, out (and residual_out) written once, at the speed of a
// copy. For small inputs: the latency of a load, a reduction and a store, hence few instructions
// for addresses.
#ifndef KERNELS_NORM_NORM_FORWARD_CUH_
#define KERNELS_NORM_NORM_FORWARD_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/norm/elements.cuh"
#include "kernels/norm/moments.cuh"
#include "kernels/norm/norm_kernels.h"
#include "kernels/norm/parameters.cuh"
#include "kernels/norm/teams.cuh"
#include "kernels/sm90/early_launch.h"

namespace tiercel {

template <typename Format>
inline constexpr DType kDType = Format::kBytes == 4                ? DType::kFloat32
                                : std::is_same_v<Format, BFloat16> ? DType::kBFloat16
                                                                   : DType::kFloat16;

template <typename Format, bool kAligned16, int kVectors, bool kResidual>
__global__ void __launch_bounds__(norm_forward_threads(Format::kBytes, kAligned16, kVectors),
                                  norm_forward_resident_blocks(kDType<Format>, kAligned16, kVectors,
                                                               kResidual))
    norm_forward(const __grid_constant__ NormForwardArgs args) {
  using Values = Chunk<Format, kAligned16>;
  constexpr int kElements = Values::kElements;
  constexpr NormParameters kParameters = norm_forward_parameters(kAligned16, kVectors, kResidual);
  constexpr bool kEarly = kParameters == NormParameters::kFloats;
  constexpr bool kPacked = kParameters == NormParameters::kPacked;
  constexpr bool kFloat32 = Format::kBytes == 4;  // parameters have x's type

  const int place = threadIdx.x, places = blockDim.x;
  const int row = blockIdx.x >> args.cluster_log2;
  const int rank = blockIdx.x & ((1 << args.cluster_log2) - 1);
  const int first = rank * args.slice;
  const int columns = min(args.slice, args.columns - first);
  const auto local = [&](int v) { return (v * places + place) * kElements; };
  const auto valid = [&](int v) { return local(v) < columns; };

  const char* const x = args.x + int64_t{row} * args.x_stride;
  const char* const residual = args.residual + int64_t{row} * args.residual_stride;
  // The first blocks prefetch their rows into the L2 while the previous grid still runs.
  if (kAligned16 && static_cast<int>(blockIdx.x) < args.prefetch_blocks) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!valid(v)) continue;
      const int offset = (first + local(v)) * Format::kBytes;
      prefetch_l2(x + offset);
      if constexpr (kResidual) prefetch_l2(residual + offset);
      if (kVectors <= 2 && row < kNormParametersAhead) {
        prefetch_parameters<Format>(args, first + local(v));
      }
    }
  }
  // The next grid may fill free room once the last blocks run.
  grid_dependency_wait_and_launch(args.early_launch);

  Values values[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    values[v].clear();
    if (valid(v)) {
      values[v].load(x + (first + local(v)) * (kAligned16 ? Format::kBytes : args.x_inner));
    }
  }
  constexpr int kMost = kAligned16 ? 8 : 4;  // vectors of `residual` loaded at a time
  constexpr int kGroup = kVectors < kMost ? kVectors : kMost;
  Values others[kGroup];
  const auto load_others = [&](int group) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      others[g].clear();
      if (valid(group + g)) {
        others[g].load(residual + (first + local(group + g)) *
                                      (kAligned16 ? Format::kBytes : args.residual_inner));
      }
    }
  };
  if constexpr (kResidual) load_others(0);
  float weights[kEarly ? kVectors : 1][kElements], biases[kEarly ? kVectors : 1][kElements];
  if constexpr (kEarly) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (args.weight != nullptr && valid(v)) {
        read_parameter<Format, kAligned16>(weights[v], args.weight, args.weight_float32,
                                           first + local(v));
      }
      if (args.bias != nullptr && valid(v)) {
        read_parameter<Format, kAligned16>(biases[v], args.bias, args.bias_float32,
                                           first + local(v));
      }
    }
  }
  Values packed_weights[kPacked ? kVectors : 1], packed_biases[kPacked ? kVectors : 1];
  if constexpr (kPacked) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!valid(v)) continue;
      const int offset = (first + local(v)) * Format::kBytes;
      if (args.weight != nullptr && !args.weight_float32) {
        packed_weights[v].load(args.weight + offset);
      }
      if (args.bias != nullptr && !args.bias_float32) packed_biases[v].load(args.bias + offset);
    }
  }
  __shared__ BlockScratch scratch;
  const BlockTeam team(rank, 1 << args.cluster_log2);
  team.start(scratch);
  if constexpr (kResidual) {
    char* const sum = args.residual_out + int64_t{row} * args.out_stride;
#pragma unroll
    for (int group = 0; group < kVectors; group += kGroup) {
      if (group > 0) load_others(group);
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        const int v = group + g;
        float a[kElements], b[kElements];
        values[v].unpack(a);
        others[g].unpack(b);
#pragma unroll
        for (int i = 0; i < kElements; ++i) a[i] += b[i];
        values[v].pack(a);
        if (valid(v)) values[v].store(sum + (first + local(v)) * Format::kBytes);
      }
      if (kGroup < kVectors) asm volatile("" ::: "memory");
    }
  }

  RowMoments moments = {};
  if (!args.layer_norm) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float x[kElements];
      values[v].unpack(x);
#pragma unroll
      for (int i = 0; i < kElements; ++i) moments.square += x[i] * x[i];
    }
    moments.square = team.sum(scratch, lanes_reduce<32>(moments.square, Sum()));
  } else {
    float first_values[kElements];
    values[0].unpack(first_values);
    Distances<> distances;
    distances.measure_from(first_values[0]);
    int count = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!valid(v)) continue;
      count += kElements;
      float x[kElements];
      values[v].unpack(x);
      distances.add(x);
    }
    moments = team.join(scratch, distances.of_warp(Count(count)).entry(Count::of_warp(count)),
                        args.inverse_columns);
  }
  const float rstd = reciprocal_root(fmaf(moments.square, args.inverse_columns, args.eps));
  const float shift = -moments.apart * rstd;

  char* const out = args.out + int64_t{row} * args.out_stride;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!valid(v)) continue;
    float x[kElements];
    values[v].drop_unpacked_copies();
    values[v].unpack(x);
#pragma unroll
    for (int i = 0; i < kElements; ++i) x[i] = fmaf(x[i] - moments.about, rstd, shift);
    if (args.weight != nullptr) {
      float w[kElements];
      if (kPacked && (kFloat32 || !args.weight_float32)) {
        packed_weights[kPacked ? v : 0].unpack(w);
      } else if constexpr (!kEarly) {
        read_parameter<Format, kAligned16>(w, args.weight, args.weight_float32, first + local(v));
      }
#pragma unroll
      for (int i = 0; i < kElements; ++i) x[i] *= kEarly ? weights[kEarly ? v : 0][i] : w[i];
    }
    if (args.bias != nullptr) {
      float b[kElements];
      if (kPacked && (kFloat32 || !args.bias_float32)) {
        packed_biases[kPacked ? v : 0].unpack(b);
      } else if constexpr (!kEarly) {
        read_parameter<Format, kAligned16>(b, args.bias, args.bias_float32, first + local(v));
      }
#pragma unroll
      for (int i = 0; i < kElements; ++i) x[i] += kEarly ? biases[kEarly ? v : 0][i] : b[i];
    }
    Values result;
    result.pack(x);
    result.store(out + (first + local(v)) * Format::kBytes);
  }
}

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_FORWARD_CUH_
