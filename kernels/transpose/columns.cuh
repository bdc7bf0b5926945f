// SPDX-License-Identifier: Apache-2.0
// copy_transpose to short columns of 2-byte elements whose rows or columns do not begin on 16
// bytes, in matrices that do.
//
// A tile consists of whole columns, so it writes contiguous memory: whole 16-byte chunks, if tiles
// begin at multiples of args.group columns, which together are whole chunks. x is loaded into
// shared memory as in realigned.cuh. A thread assembles the chunks at one position of each group:
// their elements have the same positions in the same rows, one group of columns apart.
#ifndef KERNELS_TRANSPOSE_COLUMNS_CUH_
#define KERNELS_TRANSPOSE_COLUMNS_CUH_

#include <cstdint>

#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/vector.cuh"
#include "kernels/transpose/copy_transpose_kernels.h"
#include "kernels/transpose/realigned.cuh"
#include "kernels/transpose/tile.cuh"

namespace tiercel {

template <int kBytes, int kTileRows, int kTileColumns, int kThreads>
__global__ void __launch_bounds__(kThreads, 4)
    copy_transpose_columns(const __grid_constant__ CopyTransposeArgs args) {
  using Rows = Staging<kBytes, kTileRows, kTileColumns, 0>;
  constexpr int kPerChunk = Rows::kPerChunk;
  constexpr int kDown = 16, kAcross = 32 / kDown;  // lanes
  extern __shared__ __align__(128) char staged[];

  const Tile at = tile_of<true>(args, gridDim.x - 1 - blockIdx.x);
  const int64_t first_column = static_cast<int64_t>(at.column) * args.tile_width;
  const int rows = static_cast<int>(args.rows);
  const int columns = static_cast<int>(min(args.columns - first_column, int64_t{args.tile_width}));
  const Source<kBytes> tile(args, at.matrix, 0, first_column, rows, columns);
  prefetch_tile<kThreads>(args, tile);
  grid_dependency_wait();
  grid_dependency_launch();
  stage_tile<kThreads, Rows>(args, tile, staged);
  __syncthreads();

  const int chunks = args.group * rows / kPerChunk;  // per group
  const int all = columns * rows / kPerChunk;
  const int lane = threadIdx.x % 32;
  char* out = args.out + (at.matrix * args.columns + first_column) * args.rows * kBytes;
  for (int first = threadIdx.x / 32 * kDown; first < chunks; first += kThreads / 32 * kDown) {
    const int chunk = first + lane % kDown;
    if (chunk >= chunks) continue;
    int column = chunk * kPerChunk / rows, row = chunk * kPerChunk - column * rows;
    column += lane / kDown * args.group;
    int places[kPerChunk];
#pragma unroll
    for (int e = 0; e < kPerChunk; ++e) {
      places[e] = Rows::offset(row) + tile.shift(row) + column * kBytes;
      if (++row == rows) row = 0, ++column;
    }
    const int further = kAcross * args.group * kBytes;
#pragma unroll 4
    for (int k = lane / kDown * chunks + chunk; k < all; k += kAcross * chunks) {
      uint32_t words[4];
      collect<kBytes>(words, staged, places);
      store_vector(out + static_cast<int64_t>(k) * 16, words);
#pragma unroll
      for (int e = 0; e < kPerChunk; ++e) places[e] += further;
    }
  }
}

}  // namespace tiercel

#endif  // KERNELS_TRANSPOSE_COLUMNS_CUH_
