// SPDX-License-Identifier: Apache-2.0
// copy_transpose: out[b][j][i] = x[b][i][j] for elements of 1, 2 or 4 bytes.
//
// The plan. Every byte is read once and written once; at 4.2 TB/s a 16384x4096 bfloat16 matrix
// takes 64 us, and nothing but the pattern of accesses decides how near one gets. Neighbouring
// lanes read neighbouring vectors of a row, and must write neighbouring vectors of a column.
//  - in_registers, where both sides allow 16-byte (8-, 4-byte) vectors: a lane reads a square of
//    16 / element-size vectors, one a row, turns it by byte permutations and writes as many. A
//    warp's lanes are kLanesAcross by 32 / kLanesAcross squares, so reads are segments of 16 *
//    kLanesAcross bytes and writes of 512 / kLanesAcross; both are whole sectors, and the L2 joins
//    those of a block's warps. No shared memory, no barrier: up to 16 loads a lane in flight.
//  - realigned, where a row of x or of out does not begin on 16 bytes: 16-byte chunks, aligned as
//    memory is, go into shared memory as they are, each row with its own shift; chunks of out are
//    collected from there, element by element, aligned as out is. A row's chunks are swizzled by
//    the row's number so that one chunk of eight groups of rows lies in eight different banks. Only
//    the chunks at a tile's edge are read and written in elements.
// Tiles go down in groups of rows of tiles: blocks that run together then read and write long runs.
#include <cstdint>

#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/vector.cuh"
#include "kernels/transpose/copy_transpose_kernels.h"
#include "kernels/transpose/turn.cuh"

namespace tiercel {
namespace {

struct Tile {
  int row;  // in tiles
  int column;
};

__device__ __forceinline__ Tile tile_of(const CopyTransposeArgs& args, unsigned block) {
  const unsigned columns = args.tile_columns;
  const unsigned group_tiles = args.group * columns;
  const unsigned first = block / group_tiles * args.group;
  const unsigned place = block % group_tiles;
  const unsigned left = args.tile_rows - first;
  const unsigned height = left < static_cast<unsigned>(args.group) ? left : args.group;
  return {static_cast<int>(first + place % height), static_cast<int>(place / height)};
}

template <int kBytes, int kVector, int kLanesAcross, int kWarpsAcross, int kWarpsDown>
__global__ void __launch_bounds__(32 * kWarpsAcross * kWarpsDown)
    copy_transpose_in_registers(const __grid_constant__ CopyTransposeArgs args) {
  constexpr int kEdge = kVector / kBytes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Tile tile = tile_of(args, blockIdx.x);
  const int64_t row =
      (static_cast<int64_t>(tile.row * kWarpsDown + warp / kWarpsAcross) * (32 / kLanesAcross) +
       lane / kLanesAcross) *
      kEdge;
  const int64_t column =
      (static_cast<int64_t>(tile.column * kWarpsAcross + warp % kWarpsAcross) * kLanesAcross +
       lane % kLanesAcross) *
      kEdge;
  grid_dependency_wait();
  grid_dependency_launch();
  if (row >= args.rows || column >= args.columns) return;  // both are whole squares

  for (int64_t b = blockIdx.y; b < args.batch; b += gridDim.y) {
    const char* from = args.x + b * args.batch_stride + row * args.row_stride + column * kBytes;
    Square<kBytes, kEdge> square;
#pragma unroll
    for (int i = 0; i < kEdge; ++i) load_vector(square.rows[i], from + i * args.row_stride);
    const Square<kBytes, kEdge> turned = square.turned();
    const int64_t out_stride = args.rows * kBytes;
    char* to = args.out + (b * args.columns + column) * out_stride + row * kBytes;
#pragma unroll
    for (int j = 0; j < kEdge; ++j) store_vector(to + j * out_stride, turned.rows[j]);
  }
}

template <int kBytes>
struct Element;
template <>
struct Element<1> {
  using Type = uint8_t;
};
template <>
struct Element<2> {
  using Type = uint16_t;
};
template <>
struct Element<4> {
  using Type = uint32_t;
};

// Rows of chunks in shared memory.
template <int kBytes, int kEdge>
struct Staging {
  static constexpr int kPerChunk = 16 / kBytes;
  static constexpr int kChunks = kEdge / kPerChunk + 1;  // a row that begins inside a chunk
  static constexpr int kPitch = (kChunks + 7) / 8 * 128;
  static constexpr int kSize = kEdge * kPitch;

  // Where byte `byte` of row `row` lies.
  static __device__ __forceinline__ int offset(int row, int byte) {
    return row * kPitch + (byte ^ (row / kPerChunk % 8 * 16));
  }
};

template <int kBytes, int kEdge>
constexpr int kRealignedThreads = kEdge * kEdge * kBytes >= 64 * 64 * 2 ? 256 : 128;

template <int kBytes, int kEdge>
__global__ void __launch_bounds__(kRealignedThreads<kBytes, kEdge>)
    copy_transpose_realigned(const __grid_constant__ CopyTransposeArgs args) {
  using T = typename Element<kBytes>::Type;
  using Rows = Staging<kBytes, kEdge>;
  constexpr int kThreads = kRealignedThreads<kBytes, kEdge>;
  constexpr int kPerChunk = Rows::kPerChunk;
  extern __shared__ __align__(128) char staged[];

  const Tile tile = tile_of(args, blockIdx.x);
  const int64_t first_row = static_cast<int64_t>(tile.row) * kEdge;
  const int64_t first_column = static_cast<int64_t>(tile.column) * kEdge;
  const int rows = static_cast<int>(min(args.rows - first_row, int64_t{kEdge}));
  const int columns = static_cast<int>(min(args.columns - first_column, int64_t{kEdge}));
  grid_dependency_wait();
  grid_dependency_launch();

  for (int64_t b = blockIdx.y; b < args.batch; b += gridDim.y) {
    const char* matrix = args.x + b * args.batch_stride;
    const char* from = matrix + first_row * args.row_stride + first_column * args.column_stride;
    const bool gathers = args.column_stride != kBytes;
    // What may be read: from the first element of the matrix to its last.
    const char* end =
        matrix + (args.rows - 1) * args.row_stride + (args.columns - 1) * kBytes + kBytes;
    const auto shift_of = [&](int row) {
      return gathers
                 ? 0
                 : static_cast<int>(reinterpret_cast<uintptr_t>(from + row * args.row_stride) % 16);
    };

#pragma unroll 4
    for (int i = threadIdx.x; i < kEdge * Rows::kChunks; i += kThreads) {
      const int row = i / Rows::kChunks, chunk = i % Rows::kChunks;
      const char* start = from + row * args.row_stride;
      const int shift = shift_of(row);
      if (row >= rows || chunk * 16 >= shift + columns * kBytes) continue;
      const char* address = start - shift + chunk * 16;
      if (!gathers && address >= matrix && address + 16 <= end) {
        uint32_t words[4];
        load_vector(words, address);
        store_vector(staged + Rows::offset(row, chunk * 16), words);
      } else {
        for (int e = 0; e < kPerChunk; ++e) {
          const int column = chunk * kPerChunk + e - shift / kBytes;
          if (column >= 0 && column < columns) {
            *reinterpret_cast<T*>(staged + Rows::offset(row, shift + column * kBytes)) =
                *reinterpret_cast<const T*>(start + column * args.column_stride);
          }
        }
      }
    }
    __syncthreads();

    const int64_t out_stride = args.rows * kBytes;
    char* to = args.out + (b * args.columns + first_column) * out_stride + first_row * kBytes;
#pragma unroll 2
    for (int i = threadIdx.x; i < kEdge * Rows::kChunks; i += kThreads) {
      const int column = i / Rows::kChunks, chunk = i % Rows::kChunks;
      char* start = to + column * out_stride;
      const int out_shift = static_cast<int>(reinterpret_cast<uintptr_t>(start) % 16);
      const int first = chunk * kPerChunk - out_shift / kBytes;  // row of the chunk's first element
      if (column >= columns || first >= rows) continue;
      uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
      for (int e = 0; e < kPerChunk; ++e) {
        const int row = first + e;
        if (row >= 0 && row < rows) {
          const uint32_t value = *reinterpret_cast<const T*>(
              staged + Rows::offset(row, shift_of(row) + column * kBytes));
          words[e * kBytes / 4] |= value << (e * kBytes % 4 * 8);
        }
      }
      if (first >= 0 && first + kPerChunk <= rows) {
        store_vector(start - out_shift + chunk * 16, words);
      } else {
#pragma unroll
        for (int e = 0; e < kPerChunk; ++e) {
          const int row = first + e;
          if (row >= 0 && row < rows) {
            *reinterpret_cast<T*>(start + row * kBytes) =
                static_cast<T>(words[e * kBytes / 4] >> (e * kBytes % 4 * 8));
          }
        }
      }
    }
    if (b + gridDim.y < args.batch) __syncthreads();
  }
}

#define TIERCEL_IN_REGISTERS(bytes, vector, lanes, across, down)                            \
  {bytes,                                                                                   \
   down * (32 / lanes) * (vector / bytes),                                                  \
   across * lanes * (vector / bytes),                                                       \
   vector,                                                                                  \
   32 * across * down,                                                                      \
   0,                                                                                       \
   Kernel("copy_transpose_in_registers<bytes=" #bytes ", vector=" #vector ", lanes=" #lanes \
          ", warps=" #across "x" #down ">",                                                 \
          reinterpret_cast<const void*>(                                                    \
              copy_transpose_in_registers<bytes, vector, lanes, across, down>))}
#define TIERCEL_REALIGNED(bytes, edge)                                          \
  {bytes,                                                                       \
   edge,                                                                        \
   edge,                                                                        \
   bytes,                                                                       \
   kRealignedThreads<bytes, edge>,                                              \
   Staging<bytes, edge>::kSize,                                                 \
   Kernel("copy_transpose_realigned<bytes=" #bytes ", edge=" #edge ">",         \
          reinterpret_cast<const void*>(copy_transpose_realigned<bytes, edge>), \
          Staging<bytes, edge>::kSize)}

// By element, then tile; of each tile first the one that needs alignment.
const CopyTransposeKernel kKernels[] = {
    TIERCEL_IN_REGISTERS(1, 4, 8, 1, 2),  TIERCEL_REALIGNED(1, 32),
    TIERCEL_IN_REGISTERS(1, 8, 8, 1, 2),  TIERCEL_REALIGNED(1, 64),
    TIERCEL_IN_REGISTERS(1, 16, 8, 1, 2), TIERCEL_REALIGNED(1, 128),
    TIERCEL_IN_REGISTERS(2, 8, 8, 1, 2),  TIERCEL_REALIGNED(2, 32),
    TIERCEL_IN_REGISTERS(2, 16, 8, 1, 2), TIERCEL_REALIGNED(2, 64),
    TIERCEL_IN_REGISTERS(2, 16, 8, 2, 4), TIERCEL_REALIGNED(2, 128),
    TIERCEL_IN_REGISTERS(4, 16, 8, 1, 2), TIERCEL_REALIGNED(4, 32),
    TIERCEL_IN_REGISTERS(4, 16, 8, 2, 4), TIERCEL_REALIGNED(4, 64),
    TIERCEL_IN_REGISTERS(4, 16, 8, 4, 8), TIERCEL_REALIGNED(4, 128),
};

}  // namespace

const CopyTransposeKernel* copy_transpose_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
