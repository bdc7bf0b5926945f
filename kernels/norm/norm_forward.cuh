// SPDX-License-Identifier: Apache-2.0
// rms_norm and layer_norm. Each thread holds kVectors vectors of a row in registers, so x is read
// once; a row belongs to 8 to 32 lanes, to a block, or to the blocks of a cluster. One row a team,
// blocks in the order of rows: what the memory likes best. Bytes: x (and residual) read once, out
// (and residual_out) written once; the floor is those at the speed of a copy, or for small inputs
// the latency of a load, a reduction and a store: addresses need few instructions for that reason.
#ifndef KERNELS_NORM_NORM_FORWARD_CUH_
#define KERNELS_NORM_NORM_FORWARD_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/norm/elements.cuh"
#include "kernels/norm/norm_kernels.h"
#include "kernels/norm/teams.cuh"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {

// A vector of weight or bias as float32.
template <typename Format, bool kWide>
__device__ __forceinline__ void read_parameter(float (&values)[Chunk<Format, kWide>::kElements],
                                               const char* data, bool float32, int column) {
  if (float32) {
    const float* const from = reinterpret_cast<const float*>(data) + column;
    if constexpr (kWide) {
#pragma unroll
      for (int p = 0; p < Chunk<Format, kWide>::kElements / 4; ++p) {
        const float4 part = reinterpret_cast<const float4*>(from)[p];
        values[4 * p] = part.x, values[4 * p + 1] = part.y;
        values[4 * p + 2] = part.z, values[4 * p + 3] = part.w;
      }
    } else {
      values[0] = *from;
    }
  } else {
    Chunk<Format, kWide> chunk;
    chunk.load_any(data + column * Format::kBytes);
    chunk.unpack(values);
  }
}

template <typename Format>
inline constexpr DType kDType = Format::kBytes == 4                ? DType::kFloat32
                                : std::is_same_v<Format, BFloat16> ? DType::kBFloat16
                                                                   : DType::kFloat16;

template <typename Format, bool kWide, int kVectors, bool kResidual, bool kBlockRow>
__global__ void __launch_bounds__(norm_forward_threads(Format::kBytes, kWide, kVectors, kBlockRow),
                                  norm_forward_blocks(kDType<Format>, kWide, kVectors, kBlockRow,
                                                      kResidual))
    norm_forward(const __grid_constant__ NormForwardArgs args) {
  using Values = Chunk<Format, kWide>;
  constexpr int kElements = Values::kElements;
  constexpr NormParameters kParameters =
      norm_forward_parameters(kWide, kVectors, kResidual, kBlockRow);
  constexpr bool kEarly = kParameters == NormParameters::kFloats;
  constexpr bool kPacked = kParameters == NormParameters::kPacked;
  constexpr bool kFloat32 = Format::kBytes == 4;  // then parameters have x's type

  int place, places, row, first = 0, rank = 0;
  if constexpr (kBlockRow) {
    place = threadIdx.x;
    places = blockDim.x;
    row = blockIdx.x >> args.cluster_log2;
    rank = blockIdx.x & ((1 << args.cluster_log2) - 1);
    first = rank * args.slice;
  } else {
    place = threadIdx.x & ((1 << args.lanes_log2) - 1);
    places = 1 << args.lanes_log2;
    row = (blockIdx.x * blockDim.x + threadIdx.x) >> args.lanes_log2;
  }
  const int columns = kBlockRow ? min(args.slice, args.columns - first) : args.columns;
  const bool real = kBlockRow || row < args.rows;
  const auto local = [&](int v) { return (v * places + place) * kElements; };
  const auto valid = [&](int v) { return local(v) < columns && real; };

  grid_dependency_wait();
  grid_dependency_launch();  // once the last blocks run, the next grid's may take what room there
                             // is

  Values values[kVectors];
  {
    const char* const x = args.x + int64_t{row} * args.x_stride;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      values[v].clear();
      if (valid(v)) {
        values[v].load(x + (first + local(v)) * (kWide ? Format::kBytes : args.x_inner));
      }
    }
  }
  float weights[kEarly ? kVectors : 1][kElements], biases[kEarly ? kVectors : 1][kElements];
  if constexpr (kEarly) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (args.weight != nullptr && valid(v)) {
        read_parameter<Format, kWide>(weights[v], args.weight, args.weight_float32,
                                      first + local(v));
      }
      if (args.bias != nullptr && valid(v)) {
        read_parameter<Format, kWide>(biases[v], args.bias, args.bias_float32, first + local(v));
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
  if constexpr (kBlockRow) team.start(scratch);
  if constexpr (kResidual) {
    const char* const residual = args.residual + int64_t{row} * args.residual_stride;
    char* const sum = args.residual_out + int64_t{row} * args.out_stride;
    constexpr int kMost = kWide ? 8 : 4;  // so many are loaded at a time
    constexpr int kGroup = kVectors < kMost ? kVectors : kMost;
#pragma unroll
    for (int group = 0; group < kVectors; group += kGroup) {
      Values others[kGroup];
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        const int v = group + g;
        others[g].clear();
        if (valid(v)) {
          others[g].load(residual +
                         (first + local(v)) * (kWide ? Format::kBytes : args.residual_inner));
        }
      }
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

  float mean = 0.0f, square = 0.0f;
  if (!args.layer_norm) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float x[kElements];
      values[v].unpack(x);
#pragma unroll
      for (int i = 0; i < kElements; ++i) square += x[i] * x[i];
    }
    if constexpr (kBlockRow) {
      square = team.sum(scratch, lanes_reduce<32>(square, Sum()));
    } else {
      square = lanes_sum(square, places);
    }
  } else {
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float x[kElements];
      values[v].unpack(x);
#pragma unroll
      for (int i = 0; i < kElements; ++i) sum += x[i];
    }
    // Squares are of distances from the mean of the warp's part, then, by Chan's formula, from
    // that of the row: nothing cancels, and one barrier does.
    float count = static_cast<float>(args.columns);
    if constexpr (kBlockRow) {
      sum = lanes_reduce<32>(sum, Sum());
      int warp_columns = 0;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int left = columns - (v * places + (place & ~31)) * kElements;
        warp_columns += max(0, min(left, 32 * kElements));
      }
      count = static_cast<float>(warp_columns);
      mean = sum / fmaxf(count, 1.0f);
    } else {
      sum = lanes_sum(sum, places);
      mean = sum * args.inverse_columns;
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!valid(v)) continue;
      float x[kElements];
      values[v].forget();
      values[v].unpack(x);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const float distance = x[i] - mean;
        square += distance * distance;
      }
    }
    if constexpr (kBlockRow) {
      square = lanes_reduce<32>(square, Sum());
      const float2 joined =
          team.join(scratch, make_float4(sum, square, mean, count), args.inverse_columns);
      mean = joined.x;
      square = joined.y;
    } else {
      square = lanes_sum(square, places);
    }
  }
  const float rstd = reciprocal_root(fmaf(square, args.inverse_columns, args.eps));

  char* const out = args.out + int64_t{row} * args.out_stride;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!valid(v)) continue;
    float x[kElements];
    values[v].forget();
    values[v].unpack(x);
#pragma unroll
    for (int i = 0; i < kElements; ++i) x[i] = (x[i] - mean) * rstd;
    if (args.weight != nullptr) {
      float w[kElements];
      if (kPacked && (kFloat32 || !args.weight_float32)) {
        packed_weights[kPacked ? v : 0].unpack(w);
      } else if constexpr (!kEarly) {
        read_parameter<Format, kWide>(w, args.weight, args.weight_float32, first + local(v));
      }
#pragma unroll
      for (int i = 0; i < kElements; ++i) x[i] *= kEarly ? weights[kEarly ? v : 0][i] : w[i];
    }
    if (args.bias != nullptr) {
      float b[kElements];
      if (kPacked && (kFloat32 || !args.bias_float32)) {
        packed_biases[kPacked ? v : 0].unpack(b);
      } else if constexpr (!kEarly) {
        read_parameter<Format, kWide>(b, args.bias, args.bias_float32, first + local(v));
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
