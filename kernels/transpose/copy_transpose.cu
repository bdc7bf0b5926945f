// SPDX-License-Identifier: Apache-2.0
// copy_transpose: out[b][j][i] = x[b][i][j] for elements of 1, 2 or 4 bytes.
//
// Every byte is read once and written once; at 4.2 TB/s a 16384x4096 bfloat16 matrix takes 64 us.
// The access pattern alone decides how close a kernel gets. A lane transposes squares of 16-byte
// (8-, 4-byte) vectors, one per row, by byte permutations; the kernels differ in how the lane gets
// them:
//  - in_registers, small problems: a lane loads its square itself, up to 16 loads in flight. A warp
//    is kLanesAcross by 32 / kLanesAcross lanes, so it reads segments of 16 * kLanesAcross bytes
//    and writes 512 / kLanesAcross: whole sectors. No shared memory, no barrier.
//  - staged, large problems: a block loads a tile, rows of kColumns elements, into shared memory,
//    and stores columns of kRows: both runs are 256 bytes (128 for single bytes), which the last
//    10 % of bandwidth requires. Vectors are swizzled by their row, so neither side has bank
//    conflicts.
//  - realigned, if a row of x or of out does not begin on 16 bytes (realigned.cuh).
//  - columns, likewise with short columns (columns.cuh).
// Consecutive blocks are tiles below each other, whose writes are adjacent, or beside each other if
// the squares come directly from memory. Both are the fastest orders measured.
#include <cstdint>

#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/prefetch.h"
#include "kernels/sm90/tma.cuh"
#include "kernels/sm90/vector.cuh"
#include "kernels/transpose/columns.cuh"
#include "kernels/transpose/copy_transpose_kernels.h"
#include "kernels/transpose/realigned.cuh"
#include "kernels/transpose/tile.cuh"
#include "kernels/transpose/transpose_in_registers.cuh"

namespace tiercel {
namespace {

template <int kBytes, int kVector, int kLanesAcross, int kWarpsAcross, int kWarpsDown>
__global__ void __launch_bounds__(32 * kWarpsAcross * kWarpsDown)
    copy_transpose_in_registers(const __grid_constant__ CopyTransposeArgs args) {
  constexpr int kEdge = kVector / kBytes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Tile tile = tile_of<false>(args, blockIdx.x);
  const int64_t row =
      (static_cast<int64_t>(tile.row * kWarpsDown + warp / kWarpsAcross) * (32 / kLanesAcross) +
       lane / kLanesAcross) *
      kEdge;
  const int64_t column =
      (static_cast<int64_t>(tile.column * kWarpsAcross + warp % kWarpsAcross) * kLanesAcross +
       lane % kLanesAcross) *
      kEdge;
  const char* from =
      args.x + tile.matrix * args.batch_stride + row * args.row_stride + column * kBytes;
  const bool mine = row < args.rows && column < args.columns;  // both are multiples of a square
  // Prefetched by the lanes at the beginning of 32 bytes.
  if (is_prefetching(args.prefetch_blocks) && mine && lane * kVector % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kEdge; ++i) prefetch_l2(from + i * args.row_stride);
  }
  grid_dependency_wait();
  grid_dependency_launch();
  if (!mine) return;

  Square<kBytes, kEdge> square;
#pragma unroll
  for (int i = 0; i < kEdge; ++i) load_vector(square.rows[i], from + i * args.row_stride);
  const Square<kBytes, kEdge> transposed = square.transposed();
  const int64_t out_stride = args.rows * kBytes;
  char* to = args.out + (tile.matrix * args.columns + column) * out_stride + row * kBytes;
#pragma unroll
  for (int j = 0; j < kEdge; ++j) store_vector(to + j * out_stride, transposed.rows[j]);
}

// The byte offset in shared memory of vector `chunk` of a tile's row `row`.
template <int kPerVector, int kChunks>
__device__ __forceinline__ int staged_at(int row, int chunk) {
  constexpr int kSwizzle = kChunks < 8 ? kChunks : 8;
  return (row * kChunks + (chunk ^ (row / kPerVector % kSwizzle))) * 16;
}

template <int kBytes, int kRows, int kColumns, int kThreads>
__global__ void __launch_bounds__(kThreads)
    copy_transpose_staged(const __grid_constant__ CopyTransposeArgs args) {
  constexpr int kEdge = 16 / kBytes;         // of a square: elements per vector
  constexpr int kChunks = kColumns / kEdge;  // vectors across
  constexpr int kStep = kThreads / kChunks;  // rows between a thread's loads
  constexpr int kLoads = kRows / kStep;
  constexpr int kDown = kRows / kEdge;  // squares
  extern __shared__ __align__(128) char staged[];

  const Tile tile = tile_of<true>(args, blockIdx.x);
  const int64_t first_row = static_cast<int64_t>(tile.row) * kRows;
  const int64_t first_column = static_cast<int64_t>(tile.column) * kColumns;
  const int rows = static_cast<int>(min(args.rows - first_row, int64_t{kRows}));
  const int chunks = static_cast<int>(min(args.columns - first_column, int64_t{kColumns})) / kEdge;
  // (Measured on an H200: 2-byte elements gain only from the second way, 4-byte elements from
  // neither.)
  if constexpr (kBytes == 1) {
    if (is_prefetching(args.prefetch_blocks)) {
      const char* begin = args.x + tile.matrix * args.batch_stride + first_row * args.row_stride +
                          first_column * kBytes;
#pragma unroll 1
      for (int r = threadIdx.x; r < rows; r += kThreads) {
        bulk_prefetch(begin + r * args.row_stride, chunks * 16);
      }
    }
  } else if constexpr (kBytes == 2) {
    // Prefetched by the threads at the beginning of 32 bytes.
    if (is_prefetching(args.prefetch_blocks) && threadIdx.x % 2 == 0) {
      const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
      const char* begin = args.x + tile.matrix * args.batch_stride +
                          (first_row + row) * args.row_stride + first_column * kBytes + chunk * 16;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (row + i * kStep < rows && chunk < chunks) {
          prefetch_l2(begin + i * kStep * args.row_stride);
        }
      }
    }
  }
  grid_dependency_wait();
  grid_dependency_launch();

  const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
  const char* from = args.x + tile.matrix * args.batch_stride +
                     (first_row + row) * args.row_stride + first_column * kBytes + chunk * 16;
  uint32_t words[kLoads][4];
  if (kBytes == 2 && rows == kRows && chunks == kChunks) {  // most tiles, without bounds checks
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      load_vector(words[i], from + i * kStep * args.row_stride);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (row + i * kStep < rows && chunk < chunks) load_vector(words[i], from);
      from += kStep * args.row_stride;
    }
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    store_vector(staged + staged_at<kEdge, kChunks>(row + i * kStep, chunk), words[i]);
  }
  __syncthreads();

  const int64_t out_stride = args.rows * kBytes;
  char* to =
      args.out + (tile.matrix * args.columns + first_column) * out_stride + first_row * kBytes;
  static_assert(kChunks * kDown == kThreads, "one square a thread");
  const int down = threadIdx.x % kDown, across = threadIdx.x / kDown;
  if (down * kEdge >= rows || across >= chunks) return;
  Square<kBytes, kEdge> square;
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
    load_vector(square.rows[i], staged + staged_at<kEdge, kChunks>(down * kEdge + i, across));
  }
  const Square<kBytes, kEdge> transposed = square.transposed();
  to += across * kEdge * out_stride + down * 16;
#pragma unroll
  for (int j = 0; j < kEdge; ++j) {
    store_vector(to, transposed.rows[j]);
    to += out_stride;
  }
}

#define TIERCEL_IN_REGISTERS(bytes, vector, lanes, across, down)                            \
  {bytes,                                                                                   \
   down * (32 / lanes) * (vector / bytes),                                                  \
   across * lanes * (vector / bytes),                                                       \
   vector,                                                                                  \
   false,                                                                                   \
   32 * across * down,                                                                      \
   0,                                                                                       \
   Kernel("copy_transpose_in_registers<bytes=" #bytes ", vector=" #vector ", lanes=" #lanes \
          ", warps=" #across "x" #down ">",                                                 \
          reinterpret_cast<const void*>(                                                    \
              copy_transpose_in_registers<bytes, vector, lanes, across, down>))}
#define TIERCEL_STAGED(bytes, rows, columns, threads)                                          \
  {bytes,                                                                                      \
   rows,                                                                                       \
   columns,                                                                                    \
   16,                                                                                         \
   false,                                                                                      \
   threads,                                                                                    \
   rows * columns * bytes,                                                                     \
   Kernel("copy_transpose_staged<bytes=" #bytes ", tile=" #rows "x" #columns ">",              \
          reinterpret_cast<const void*>(copy_transpose_staged<bytes, rows, columns, threads>), \
          rows * columns * bytes)}
#define TIERCEL_UNALIGNED(form, whole, bytes, rows, columns, more, threads, ...)    \
  {bytes,                                                                           \
   rows,                                                                            \
   columns,                                                                         \
   bytes,                                                                           \
   whole,                                                                           \
   threads,                                                                         \
   Staging<bytes, rows, columns, more>::kSize,                                      \
   Kernel("copy_transpose_" form "<bytes=" #bytes ", tile=" #rows "x" #columns ">", \
          reinterpret_cast<const void*>(__VA_ARGS__), Staging<bytes, rows, columns, more>::kSize)}
#define TIERCEL_REALIGNED(bytes, rows, columns, threads, blocks)      \
  TIERCEL_UNALIGNED("realigned", false, bytes, rows, columns,         \
                    copy_transpose_run(bytes, rows) / bytes, threads, \
                    copy_transpose_realigned<bytes, rows, columns, threads, blocks>)
#define TIERCEL_COLUMNS(bytes, rows, columns, threads)                 \
  TIERCEL_UNALIGNED("columns", true, bytes, rows, columns, 0, threads, \
                    copy_transpose_columns<bytes, rows, columns, threads>)

// By element, then tile; for each tile, the kernel that needs alignment comes first.
const CopyTransposeKernel kKernels[] = {
    TIERCEL_IN_REGISTERS(1, 4, 8, 1, 2),   TIERCEL_REALIGNED(1, 32, 32, 128, 8),
    TIERCEL_IN_REGISTERS(1, 8, 8, 1, 2),   TIERCEL_REALIGNED(1, 64, 64, 128, 8),
    TIERCEL_STAGED(1, 128, 128, 64),       TIERCEL_REALIGNED(1, 128, 128, 256, 4),
    TIERCEL_STAGED(1, 256, 128, 128),

    TIERCEL_IN_REGISTERS(2, 8, 8, 1, 2),   TIERCEL_REALIGNED(2, 32, 32, 128, 8),
    TIERCEL_IN_REGISTERS(2, 16, 8, 1, 2),  TIERCEL_REALIGNED(2, 64, 64, 256, 4),
    TIERCEL_STAGED(2, 128, 128, 256),      TIERCEL_REALIGNED(2, 128, 128, 256, 4),
    TIERCEL_REALIGNED(2, 64, 128, 256, 4), TIERCEL_COLUMNS(2, 128, 128, 256),
    TIERCEL_COLUMNS(2, 256, 64, 256),

    TIERCEL_IN_REGISTERS(4, 16, 8, 1, 2),  TIERCEL_REALIGNED(4, 32, 32, 128, 8),
    TIERCEL_STAGED(4, 64, 64, 256),        TIERCEL_REALIGNED(4, 64, 64, 256, 4),
    TIERCEL_STAGED(4, 128, 128, 1024),     TIERCEL_REALIGNED(4, 128, 128, 256, 4),
};

}  // namespace

const CopyTransposeKernel* copy_transpose_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
