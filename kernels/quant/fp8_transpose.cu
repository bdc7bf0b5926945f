// SPDX-License-Identifier: Apache-2.0
// fp8_quantize_transpose: e4m3 of x and of its transpose, each with scales along its own rows.
//
// Bound by memory: bfloat16 is read once, 2 bytes a value, and 1 + 1 written: [8192, 8192] are 256
// MiB, 62 us at 4.3 TB/s; fp8_quantize of x and of a transposed copy moves 10 bytes a value.
//
// A block has a tile of 128x128 values in registers: a thread 8 rows by 8 columns of it, so that
// its part of a column is 8 bytes of the transpose. The maximum of 128 values of a row is in 16
// lanes; that of a column in two lanes of each of the 8 warps, and goes through shared memory, as
// the transposed values do: in units of 8 bytes, swizzled within a row of 128 bytes (exclusive or
// with the column), so that neither stores nor 16-byte loads have bank conflicts.
//
// Values beyond the last row are zeros. The arithmetic is fp8_quantize's, bit for bit.
#include <cstdint>

#include "kernels/quant/eight.cuh"
#include "kernels/quant/fp8_transpose_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/prefetch.h"

namespace tiercel {
namespace {

constexpr int kTile = 128;
constexpr int kThreads = kFp8TransposeThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kAcross = kTile / 8;  // threads side by side, and below each other

// The largest magnitudes of 8 columns over 8 rows, as bits of floats.
template <typename Source>
__device__ __forceinline__ void largest_of_columns(uint32_t (&largest)[8],
                                                   const Eight<Source> (&x)[8]) {
  if constexpr (Source::kBytes == 4) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      largest[j] = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) largest[j] = max(largest[j], x[i].words[j] & 0x7fffffffu);
    }
  } else {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t halves = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) halves = max_of_halves(halves, x[i].words[w] & 0x7fff7fffu);
      largest[2 * w] = __float_as_uint(Source::low(halves & 0xffffu));
      largest[2 * w + 1] = __float_as_uint(Source::high(halves));
    }
  }
}

template <typename Source>
__global__ void __launch_bounds__(kThreads, Source::kBytes == 4 ? 2 : 4)
    fp8_quantize_transpose(const __grid_constant__ Fp8TransposeArgs args) {
  __shared__ uint4 turned[kTile][kAcross / 2];  // two units of 8 bytes
  __shared__ uint32_t column_largest[kWarps][kTile];
  __shared__ __align__(16) float column_inverse[kTile];
  const int tile_row = blockIdx.x / args.column_tiles;
  const int tile_column = blockIdx.x - tile_row * args.column_tiles;
  const int across = threadIdx.x % kAcross, down = threadIdx.x / kAcross;
  const int64_t row = static_cast<int64_t>(tile_row) * kTile + down * 8;
  const int64_t first_column = static_cast<int64_t>(tile_column) * kTile;
  const int64_t column = first_column + across * 8;
  const char* x = args.x + row * args.row_bytes + column * Source::kBytes;
  const auto has = [&](int i) { return row + i < args.rows && column < args.columns; };
  if (is_prefetching(args.prefetch_blocks)) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (has(i)) prefetch_l2(x + i * args.row_bytes);
    }
  }
  grid_dependency_wait();
  grid_dependency_launch();
  Eight<Source> values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[i].clear();
    if (has(i)) values[i].load(x + i * args.row_bytes);
  }

  float by_column[8];
  char* q = args.q + row * args.columns + column;
  if (args.tiles) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = max(largest, values[i].largest());
    const float scale = e4m3_scale(block_max(largest, column_largest[0]));
    const float inverse = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (has(i)) store_scaled(q + i * args.columns, values[i], inverse);
      by_column[i] = inverse;
    }
    if (threadIdx.x == 0) {
      args.scale[blockIdx.x] = scale;
      args.scale_t[static_cast<int64_t>(tile_column) * args.row_tiles + tile_row] = scale;
    }
  } else {
    uint32_t largest[8];
    largest_of_columns(largest, values);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      largest[j] = max(largest[j], __shfl_xor_sync(kFullWarp, largest[j], kAcross));
    }
    if (threadIdx.x % 32 < kAcross) {
      auto* to = reinterpret_cast<uint4*>(&column_largest[threadIdx.x / 32][across * 8]);
      to[0] = make_uint4(largest[0], largest[1], largest[2], largest[3]);
      to[1] = make_uint4(largest[4], largest[5], largest[6], largest[7]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float scale = e4m3_scale(lanes_reduce<kAcross>(values[i].largest(), Max()));
      if (has(i)) {
        store_scaled(q + i * args.columns, values[i], __frcp_rn(scale));
        if (across == 0) args.scale[(row + i) * args.column_tiles + tile_column] = scale;
      }
    }
    __syncthreads();
    if (threadIdx.x < kTile) {
      uint32_t of_column = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) of_column = max(of_column, column_largest[w][threadIdx.x]);
      const float scale = e4m3_scale(of_column);
      column_inverse[threadIdx.x] = __frcp_rn(scale);
      if (first_column + threadIdx.x < args.columns) {
        args.scale_t[tile_row * args.columns + first_column + threadIdx.x] = scale;
      }
    }
    __syncthreads();
    const auto* inverse = reinterpret_cast<const float4*>(column_inverse + across * 8);
    const float4 a = inverse[0], b = inverse[1];
    by_column[0] = a.x, by_column[1] = a.y, by_column[2] = a.z, by_column[3] = a.w;
    by_column[4] = b.x, by_column[5] = b.y, by_column[6] = b.z, by_column[7] = b.w;
  }

  auto* units = reinterpret_cast<uint2*>(turned);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float scaled[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) scaled[i] = values[i][j] * by_column[j];
    units[(across * 8 + j) * kAcross + (down ^ across)] =
        make_uint2(float4_to_e4m3x4(scaled), float4_to_e4m3x4(scaled + 4));
  }
  __syncthreads();
  const int64_t padded = static_cast<int64_t>(args.row_tiles) * kTile;
  const int part = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < kTile * 8 / kThreads; ++i) {
    const int in_tile = threadIdx.x / 8 + i * (kThreads / 8);
    const int exchanged = in_tile / 8;
    const uint4 pair = turned[in_tile][part ^ exchanged / 2];
    if (first_column + in_tile < args.columns) {
      char* to = args.q_t + (first_column + in_tile) * padded + int64_t{tile_row} * kTile;
      reinterpret_cast<uint4*>(to)[part] =
          exchanged % 2 ? make_uint4(pair.z, pair.w, pair.x, pair.y) : pair;
    }
  }
}

#define TIERCEL_KERNEL(dtype)                                          \
  {DType::k##dtype, Kernel("fp8_quantize_transpose<" #dtype "Source>", \
                           reinterpret_cast<const void*>(fp8_quantize_transpose<dtype##Source>))}

const Fp8TransposeKernel kKernels[] = {TIERCEL_KERNEL(BFloat16), TIERCEL_KERNEL(Float16),
                                       TIERCEL_KERNEL(Float32)};

}  // namespace

const Fp8TransposeKernel* fp8_transpose_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
