// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_NORM_NORM_FORWARD_CUH_
#define KERNELS_NORM_NORM_FORWARD_CUH_

#include <cstdint>

#include "kernels/norm/elements.cuh"
#include "kernels/norm/norm_kernels.h"
#include "kernels/norm/teams.cuh"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {

// A weight or bias as float32: what a thread needs of it lies in slots of shared memory that no
// other thread reads, so that no barrier is due.
template <typename Format, bool kWide>
struct Parameter {
  using Values = Chunk<Format, kWide>;
  static constexpr int kElements = Values::kElements;
  static constexpr int kParts = kElements * 4 / 16;

  const char* data;
  bool float32;  // whatever Format is

  static __device__ __forceinline__ char* slot(char* slots, int v, int part) {
    return slots + ((v * kParts + part) * blockDim.x + threadIdx.x) * 16;
  }

  __device__ __forceinline__ void read(float (&values)[kElements], int column) const {
    if (float32) {
      const float* from = reinterpret_cast<const float*>(data) + column;
      if constexpr (kWide) {
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          const float4 part = reinterpret_cast<const float4*>(from)[p];
          values[4 * p] = part.x, values[4 * p + 1] = part.y;
          values[4 * p + 2] = part.z, values[4 * p + 3] = part.w;
        }
      } else {
        values[0] = *from;
      }
    } else {
      Values chunk;
      chunk.load_any(data + column * Format::kBytes);
      chunk.unpack(values);
    }
  }

  __device__ __forceinline__ void stage(char* slots, int v, int column) const {
    if constexpr (kWide) {
      float values[kElements];
      read(values, column);
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        *reinterpret_cast<float4*>(slot(slots, v, p)) = make_float4(
            values[4 * p], values[4 * p + 1], values[4 * p + 2], values[4 * p + 3]);
      }
    }
  }

  __device__ __forceinline__ void get(float (&values)[kElements], char* slots, int v,
                                      int column) const {
    if constexpr (kWide) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const float4 part = *reinterpret_cast<const float4*>(slot(slots, v, p));
        values[4 * p] = part.x, values[4 * p + 1] = part.y;
        values[4 * p + 2] = part.z, values[4 * p + 3] = part.w;
      }
    } else {
      read(values, column);
    }
  }
};

template <typename Format, bool kWide, int kVectors, bool kResidual, bool kPrefetch>
__global__ void __launch_bounds__(kPrefetch && kVectors == 4 ? 256 : kNormMaxThreads, kPrefetch && kVectors == 4 ? 3 : kVectors * (kResidual ? 2 : 1) <= 4 ? 2 : 1)
    norm_forward(const __grid_constant__ NormForwardArgs args) {
  using Values = Chunk<Format, kWide>;
  constexpr int kElements = Values::kElements;
  extern __shared__ __align__(16) char slots[];
  __shared__ Team<true>::Scratch scratch;

  const Team<true> team(args.threads_per_row);
  const int in_warp = threadIdx.x % 32 / team.lanes;  // which of the warp's rows
  const int rows_per_warp = 32 / team.lanes;
  const int teams = blockDim.x / 32 / team.warps;
  const int first = team.rank * args.slice;
  const int columns = min(args.slice, args.columns - first);  // of this block; may be negative
  const int step = gridDim.x / team.blocks * teams * rows_per_warp;
  int row = (blockIdx.x / team.blocks * teams + team.index) * rows_per_warp + in_warp;
  int place = team.place, places = team.places;
  const auto local = [&](int v) { return (v * places + place) * kElements; };
  const auto valid = [&](int v) { return local(v) < columns; };

  if (team.blocks > 1) cluster_arrive();
  grid_dependency_wait();
  if (args.early_launch) grid_dependency_launch();

  const Parameter<Format, kWide> weight{args.weight, args.weight_float32};
  const Parameter<Format, kWide> bias{args.bias, args.bias_float32};
  char* const bias_slots = slots + args.bias_slots;
  Values next[kVectors];
  Values next_residual[kResidual ? kVectors : 1];
  const auto load = [&](int r) {
    const bool real = r < args.rows;
    const char* const x = args.x + int64_t{r} * args.x_stride;
    const char* const residual = args.residual + int64_t{r} * args.residual_stride;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      next[v].clear();
      if constexpr (kResidual) next_residual[v].clear();
      if (valid(v) && real) {
        next[v].load(x + (first + local(v)) * (kWide ? Format::kBytes : args.x_inner));
        if constexpr (kResidual) {
          next_residual[v].load(residual + (first + local(v)) *
                                               (kWide ? Format::kBytes : args.residual_inner));
        }
      }
    }
  };
  load(row);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (valid(v) && args.weight) weight.stage(slots, v, first + local(v));
    if (valid(v) && args.bias) bias.stage(bias_slots, v, first + local(v));
  }
  const bool alone = team.entries() == 1;
  const float inverse_warp_columns =
      alone ? args.inverse_columns
            : 1.0f / fmaxf(team.warp_columns(kVectors, kElements, columns), 1.0f);
  if (team.blocks > 1) cluster_wait();
  if (args.layer_norm && !alone) {
    team.publish(scratch, team.warp_columns(kVectors, kElements, columns));
  }

  for (int parity = 0; row - in_warp < args.rows; row += step, parity ^= 1) {
    asm volatile("" : "+r"(place), "+r"(places));  // offsets are cheaper made again than kept
    Values values[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      values[v] = next[v];
      if constexpr (kResidual) {
        float a[kElements], b[kElements];
        next[v].unpack(a);
        next_residual[v].unpack(b);
#pragma unroll
        for (int i = 0; i < kElements; ++i) a[i] += b[i];
        values[v].pack(a);
        if (valid(v) && row < args.rows) {
          values[v].store(args.residual_out + int64_t{row} * args.out_stride +
                          (first + local(v)) * Format::kBytes);
        }
      }
    }
    if constexpr (kPrefetch) load(row + step);

    float mean = 0.0f, square = 0.0f;
    if (!args.layer_norm) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float x[kElements];
        values[v].unpack(x);
#pragma unroll
        for (int i = 0; i < kElements; ++i) square += x[i] * x[i];
      }
      square = team.sum(scratch, parity, square, 0.0f).x;
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
      sum = lanes_sum(sum, team.lanes);
      mean = sum * inverse_warp_columns;
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
      square = lanes_sum(square, team.lanes);
      if (!alone) {
        team.exchange(scratch, parity, make_float4(sum, square, mean, 0.0f));
        sum = 0.0f;
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < team.entries(); i += 32) {
          sum += team.entry(scratch, parity, i).x;
        }
        mean = lanes_reduce<32>(sum, Sum()) * args.inverse_columns;
        square = 0.0f;
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < team.entries(); i += 32) {
          const float4 part = team.entry(scratch, parity, i);
          const float distance = part.z - mean;
          square += part.y + team.count(scratch, i) * distance * distance;
        }
        square = lanes_reduce<32>(square, Sum());
      }
    }
    const float rstd = reciprocal_root(fmaf(square, args.inverse_columns, args.eps));
    if (row < args.rows) {
      char* const out = args.out + int64_t{row} * args.out_stride;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!valid(v)) continue;
        float x[kElements];
        values[v].forget();
        values[v].unpack(x);
#pragma unroll
        for (int i = 0; i < kElements; ++i) x[i] = (x[i] - mean) * rstd;
        if (args.weight) {
          float w[kElements];
          weight.get(w, slots, v, first + local(v));
#pragma unroll
          for (int i = 0; i < kElements; ++i) x[i] *= w[i];
        }
        if (args.bias) {
          float b[kElements];
          bias.get(b, bias_slots, v, first + local(v));
#pragma unroll
          for (int i = 0; i < kElements; ++i) x[i] += b[i];
        }
        Values result;
        result.pack(x);
        result.store(out + (first + local(v)) * Format::kBytes);
      }
    }
    if constexpr (!kPrefetch) load(row + step);
  }
}

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_FORWARD_CUH_
