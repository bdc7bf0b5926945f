// SPDX-License-Identifier: Apache-2.0
// copy_transpose: out[b][j][i] = x[b][i][j] for elements of 1, 2 or 4 bytes.
//
// The plan. Every byte is read once and written once; at 4.2 TB/s a 16384x4096 bfloat16 matrix
// takes 64 us, and nothing but the pattern of accesses decides how near one gets. A lane turns
// squares of 16-byte (8-, 4-byte) vectors, one a row, by byte permutations; the kernels differ in
// how vectors come to it.
//  - in_registers, small problems: a lane loads its square itself, up to 16 loads in flight. A warp
//    is kLanesAcross by 32 / kLanesAcross lanes, so it reads segments of 16 * kLanesAcross bytes
//    and writes 512 / kLanesAcross: whole sectors. No shared memory, no barrier.
//  - staged, large problems: a block loads a tile, rows of kColumns elements, into shared memory,
//    and stores columns of kRows: both runs are 256 bytes (128 for single bytes), which is what
//    the last tenth of bandwidth takes. Vectors are swizzled by their row, so that neither side
//    has bank conflicts.
//  - realigned, where a row of x or of out does not begin on 16 bytes: 16-byte chunks, aligned as
//    memory is, go into shared memory as they are, each row with its own shift; chunks of out are
//    collected from there, element by element, aligned as out is. A run of out, two chunks mostly,
//    belongs to the tile that it begins in, which reads some rows of the next one; only the ends of
//    a column are written in elements.
// Blocks next to each other are tiles below each other (their writes are next to each other too),
// or beside each other where the squares come straight from memory: what measured best.
#include <cstdint>

#include "kernels/sm90/ahead.h"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/ring.cuh"
#include "kernels/sm90/vector.cuh"
#include "kernels/transpose/copy_transpose_kernels.h"
#include "kernels/transpose/turn.cuh"

namespace tiercel {
namespace {

struct Tile {
  int row;  // in tiles
  int column;
  int64_t matrix;
};

template <bool kDownFirst>
__device__ __forceinline__ Tile tile_of(const CopyTransposeArgs& args) {
  const unsigned down = args.tile_rows, across = args.tile_columns;
  if constexpr (kDownFirst) {
    const unsigned stack = blockIdx.x / down;
    return {static_cast<int>(blockIdx.x % down), static_cast<int>(stack % across), stack / across};
  } else {
    const unsigned line = blockIdx.x / across;
    return {static_cast<int>(line % down), static_cast<int>(blockIdx.x % across), line / down};
  }
}

template <int kBytes, int kVector, int kLanesAcross, int kWarpsAcross, int kWarpsDown>
__global__ void __launch_bounds__(32 * kWarpsAcross * kWarpsDown)
    copy_transpose_in_registers(const __grid_constant__ CopyTransposeArgs args) {
  constexpr int kEdge = kVector / kBytes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Tile tile = tile_of<false>(args);
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
  const bool mine = row < args.rows && column < args.columns;  // both are whole squares
  // By those at the beginning of 32 bytes.
  if (is_ahead(args.ahead) && mine && lane * kVector % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kEdge; ++i) prefetch_l2(from + i * args.row_stride);
  }
  grid_dependency_wait();
  grid_dependency_launch();
  if (!mine) return;

  Square<kBytes, kEdge> square;
#pragma unroll
  for (int i = 0; i < kEdge; ++i) load_vector(square.rows[i], from + i * args.row_stride);
  const Square<kBytes, kEdge> turned = square.turned();
  const int64_t out_stride = args.rows * kBytes;
  char* to = args.out + (tile.matrix * args.columns + column) * out_stride + row * kBytes;
#pragma unroll
  for (int j = 0; j < kEdge; ++j) store_vector(to + j * out_stride, turned.rows[j]);
}

// Where the vector `chunk` of row `row` of a tile lies in shared memory, in bytes.
template <int kPerVector, int kChunks>
__device__ __forceinline__ int staged_at(int row, int chunk) {
  constexpr int kSwizzle = kChunks < 8 ? kChunks : 8;
  return (row * kChunks + (chunk ^ (row / kPerVector % kSwizzle))) * 16;
}

template <int kBytes, int kRows, int kColumns, int kThreads>
__global__ void __launch_bounds__(kThreads)
    copy_transpose_staged(const __grid_constant__ CopyTransposeArgs args) {
  constexpr int kEdge = 16 / kBytes;         // of a square: the elements of a vector
  constexpr int kChunks = kColumns / kEdge;  // vectors across
  constexpr int kStep = kThreads / kChunks;  // rows between a thread's loads
  constexpr int kLoads = kRows / kStep;
  constexpr int kDown = kRows / kEdge;  // squares
  extern __shared__ __align__(128) char staged[];

  const Tile tile = tile_of<true>(args);
  const int64_t first_row = static_cast<int64_t>(tile.row) * kRows;
  const int64_t first_column = static_cast<int64_t>(tile.column) * kColumns;
  const int rows = static_cast<int>(min(args.rows - first_row, int64_t{kRows}));
  const int chunks = static_cast<int>(min(args.columns - first_column, int64_t{kColumns})) / kEdge;
  // (Measured on an H200: elements of 2 bytes gain by the second way only, of 4 by neither.)
  if constexpr (kBytes == 1) {
    if (is_ahead(args.ahead)) {
      const char* begin = args.x + tile.matrix * args.batch_stride + first_row * args.row_stride +
                          first_column * kBytes;
#pragma unroll 1
      for (int r = threadIdx.x; r < rows; r += kThreads) {
        bulk_prefetch(begin + r * args.row_stride, chunks * 16);
      }
    }
  } else if constexpr (kBytes == 2) {
    // By those at the beginning of 32 bytes.
    if (is_ahead(args.ahead) && threadIdx.x % 2 == 0) {
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
  if (kBytes == 2 && rows == kRows && chunks == kChunks) {  // most tiles: without conditions
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
  const Square<kBytes, kEdge> turned = square.turned();
  to += across * kEdge * out_stride + down * 16;
#pragma unroll
  for (int j = 0; j < kEdge; ++j) {
    store_vector(to, turned.rows[j]);
    to += out_stride;
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

// Rows of chunks in shared memory: as many more than the tile has as a run of out may need.
template <int kBytes, int kTileRows, int kTileColumns>
struct Staging {
  static constexpr int kRun = copy_transpose_run(kBytes, kTileRows);
  static constexpr int kPerChunk = 16 / kBytes;
  static constexpr int kRows = kTileRows + kRun / kBytes;
  static constexpr int kChunks = kTileColumns / kPerChunk + 1;  // a row that begins inside a chunk
  static constexpr int kPitch = kChunks * 16;
  static constexpr int kSize = kRows * kPitch + (kRows / kPerChunk + 1) * 16;

  // Where a row lies. Lanes that go down a column read rows that are kPerChunk apart: a chunk more
  // for each of these steps puts them into different banks.
  static __device__ __forceinline__ int offset(int row) {
    return row * kPitch + row / kPerChunk * 16;
  }
};

// A tile's runs of out begin at multiples of kRun bytes. What a thread takes of out begins equally
// far from one in each of its columns, which are kStep apart: what it reads of a chunk lies at the
// same places too.
template <int kBytes, int kTileRows, int kTileColumns, int kThreads>
__global__ void __launch_bounds__(kThreads)
    copy_transpose_realigned(const __grid_constant__ CopyTransposeArgs args) {
  using T = typename Element<kBytes>::Type;
  using Rows = Staging<kBytes, kTileRows, kTileColumns>;
  constexpr int kPerChunk = Rows::kPerChunk, kRun = Rows::kRun;
  constexpr int kOfColumn = kTileRows / kPerChunk;
  constexpr int kStep = kThreads / kOfColumn;
  static_assert(kThreads % kOfColumn == 0 && kStep * kBytes % kRun == 0, "columns of one shift");
  extern __shared__ __align__(128) char staged[];

  const Tile tile = tile_of<true>(args);
  const int64_t first_row = static_cast<int64_t>(tile.row) * args.tile_height;
  const int64_t first_column = static_cast<int64_t>(tile.column) * args.tile_width;
  const int64_t out_stride = args.rows * kBytes;
  char* to =
      args.out + (tile.matrix * args.columns + first_column) * out_stride + first_row * kBytes;
  const int to_shift = static_cast<int>(reinterpret_cast<uintptr_t>(to) % kRun);
  const int out_shift = static_cast<int>(out_stride % kRun);
  const int more = (to_shift | out_shift) == 0 ? 0 : kRun / kBytes;
  const int rows = static_cast<int>(min(args.rows - first_row, int64_t{args.tile_height + more}));
  const int columns = static_cast<int>(min(args.columns - first_column, int64_t{args.tile_width}));
  const char* matrix = args.x + tile.matrix * args.batch_stride;
  const char* from = matrix + first_row * args.row_stride + first_column * args.column_stride;
  const bool gathers = args.column_stride != kBytes;
  // What may be read: from the first element of the matrix to its last.
  const char* end =
      matrix + (args.rows - 1) * args.row_stride + (args.columns - 1) * kBytes + kBytes;
  // Rows' places in their first chunks.
  const int shift0 = gathers ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16);
  const int shift1 = gathers ? 0 : static_cast<int>(args.row_stride % 16);
  const char* tile_end = from + (rows - 1) * args.row_stride + columns * kBytes;
  const bool inside = !gathers && from - shift0 >= matrix && tile_end + 15 <= end;
  if (is_ahead(args.ahead) && inside) {
#pragma unroll 1
    for (int r = threadIdx.x; r < rows; r += kThreads) {
      const int shift = (shift0 + r * shift1) & 15;
      bulk_prefetch(from + (r * args.row_stride - shift), (shift + columns * kBytes + 15) & ~15);
    }
  }
  grid_dependency_wait();
  grid_dependency_launch();

  for (int i = threadIdx.x; i < Rows::kRows * Rows::kChunks; i += kThreads) {
    const int row = i / Rows::kChunks, chunk = i % Rows::kChunks;
    const char* start = from + row * args.row_stride;
    const int shift = (shift0 + row * shift1) & 15;
    if (row >= rows || chunk * 16 >= shift + columns * kBytes) continue;
    const char* address = start + (chunk * 16 - shift);
    char* to = staged + Rows::offset(row);
    if (inside || (!gathers && address >= matrix && address + 16 <= end)) {
      const uint32_t place = static_cast<uint32_t>(__cvta_generic_to_shared(to + chunk * 16));
      async_copy_16(place, address, true);
    } else {
#pragma unroll 1
      for (int e = 0; e < kPerChunk; ++e) {
        const int column = chunk * kPerChunk + e - shift / kBytes;
        if (column >= 0 && column < columns) {
          *reinterpret_cast<T*>(to + shift + column * kBytes) =
              *reinterpret_cast<const T*>(start + column * args.column_stride);
        }
      }
    }
  }

  // The chunks of out that begin in this tile; the first tile has those before them as well, in
  // elements, and the last one ends in the middle of one.
  const int mine = threadIdx.x / kOfColumn;  // the thread's first column
  // Bytes before the first run of it.
  const int head = -(to_shift + mine * out_shift) & (kRun - 1);
  const int first = head / kBytes + static_cast<int>(threadIdx.x) % kOfColumn * kPerChunk;
  const char* places[kPerChunk];
#pragma unroll
  for (int e = 0; e < kPerChunk; ++e) {
    const int row = first + e;
    places[e] = staged + Rows::offset(row) + ((shift0 + row * shift1) & 15) + mine * kBytes;
  }
  char* chunk = to + mine * out_stride + first * kBytes;
  async_copy_commit();
  async_copy_wait<0>();
  __syncthreads();

  if (first - head / kBytes < args.tile_height) {
#pragma unroll 4
    for (int j = 0; j < (kTileColumns + kStep - 1) / kStep; ++j) {
      if (mine + j * kStep >= columns) break;
      uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
      for (int e = 0; e < kPerChunk; ++e) {
        const uint32_t value = *reinterpret_cast<const T*>(places[e] + j * kStep * kBytes);
        words[e * kBytes / 4] |= value << (e * kBytes % 4 * 8);
      }
      if (first + kPerChunk <= rows) {
        store_vector(chunk, words);
      } else {
#pragma unroll
        for (int e = 0; e < kPerChunk; ++e) {
          if (first + e < rows) {
            *reinterpret_cast<T*>(chunk + e * kBytes) =
                static_cast<T>(words[e * kBytes / 4] >> (e * kBytes % 4 * 8));
          }
        }
      }
      chunk += kStep * out_stride;
    }
  }
  if (tile.row != 0 || more == 0) return;
  for (int i = threadIdx.x; i < columns * (kRun / kBytes); i += kThreads) {
    const int column = i / (kRun / kBytes), row = i % (kRun / kBytes);
    const int before = -(to_shift + column * out_shift) & (kRun - 1);
    if (row >= before / kBytes || row >= rows) continue;
    const int shift = (shift0 + row * shift1) & 15;
    *reinterpret_cast<T*>(to + column * out_stride + row * kBytes) =
        *reinterpret_cast<const T*>(staged + Rows::offset(row) + shift + column * kBytes);
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
#define TIERCEL_STAGED(bytes, rows, columns, threads)                                          \
  {bytes,                                                                                      \
   rows,                                                                                       \
   columns,                                                                                    \
   16,                                                                                         \
   threads,                                                                                    \
   rows * columns * bytes,                                                                     \
   Kernel("copy_transpose_staged<bytes=" #bytes ", tile=" #rows "x" #columns ">",              \
          reinterpret_cast<const void*>(copy_transpose_staged<bytes, rows, columns, threads>), \
          rows * columns * bytes)}
#define TIERCEL_REALIGNED(bytes, rows, columns, threads)                                          \
  {bytes,                                                                                         \
   rows,                                                                                          \
   columns,                                                                                       \
   bytes,                                                                                         \
   threads,                                                                                       \
   Staging<bytes, rows, columns>::kSize,                                                          \
   Kernel("copy_transpose_realigned<bytes=" #bytes ", tile=" #rows "x" #columns ">",              \
          reinterpret_cast<const void*>(copy_transpose_realigned<bytes, rows, columns, threads>), \
          Staging<bytes, rows, columns>::kSize)}

// By element, then tile; of each tile first the one that needs alignment. The last kernel of an
// element that fits its alignment is the one for large problems.
const CopyTransposeKernel kKernels[] = {
    TIERCEL_IN_REGISTERS(1, 4, 8, 1, 2),  TIERCEL_REALIGNED(1, 32, 32, 128),
    TIERCEL_IN_REGISTERS(1, 8, 8, 1, 2),  TIERCEL_REALIGNED(1, 64, 64, 128),
    TIERCEL_STAGED(1, 128, 128, 64),      TIERCEL_REALIGNED(1, 128, 128, 256),
    TIERCEL_STAGED(1, 256, 128, 128),

    TIERCEL_IN_REGISTERS(2, 8, 8, 1, 2),  TIERCEL_REALIGNED(2, 32, 32, 128),
    TIERCEL_IN_REGISTERS(2, 16, 8, 1, 2), TIERCEL_REALIGNED(2, 64, 64, 256),
    TIERCEL_STAGED(2, 128, 128, 256),     TIERCEL_REALIGNED(2, 128, 128, 256),
    TIERCEL_REALIGNED(2, 72, 120, 288),   TIERCEL_REALIGNED(2, 64, 128, 256),

    TIERCEL_IN_REGISTERS(4, 16, 8, 1, 2), TIERCEL_REALIGNED(4, 32, 32, 128),
    TIERCEL_STAGED(4, 64, 64, 256),       TIERCEL_REALIGNED(4, 64, 64, 256),
    TIERCEL_STAGED(4, 128, 128, 1024),    TIERCEL_REALIGNED(4, 128, 128, 256),
};

}  // namespace

const CopyTransposeKernel* copy_transpose_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
