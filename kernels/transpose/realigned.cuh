// SPDX-License-Identifier: Apache-2.0
// copy_transpose when a row of x or of out does not begin on 16 bytes.
//
// Aligned 16-byte chunks of x are copied through registers into shared memory unchanged, each row
// with its own shift. Chunks of out, aligned in out, are assembled from there element by element. A
// run of out, mostly two chunks, belongs to the tile that it begins in, which therefore reads some
// rows of the next tile; only the ends of a column are written as elements. kDown lanes of a warp
// go down a column and the others across. The pitch grows by a chunk after each kPerChunk rows, so
// that few lanes conflict in a bank. A thread's columns are kStep apart and have the same offset
// from a run's beginning, so the elements for each lie at the same positions of its rows. (Measured
// on an H200: four blocks of 256 threads per multiprocessor are best. Loads in flight occupy L1,
// which gets the memory that shared memory leaves; more blocks would have less each.)
#ifndef KERNELS_TRANSPOSE_REALIGNED_CUH_
#define KERNELS_TRANSPOSE_REALIGNED_CUH_

#include <cstdint>

#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/prefetch.h"
#include "kernels/sm90/tma.cuh"
#include "kernels/sm90/vector.cuh"
#include "kernels/transpose/copy_transpose_kernels.h"
#include "kernels/transpose/tile.cuh"

namespace tiercel {

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

// A tile of x.
template <int kBytes>
struct Source {
  const char* from;
  int rows;
  int columns;
  bool gathers;  // the elements of a row are not adjacent
  int shift0;    // of its first row, within a chunk
  int shift1;    // increment per row
  bool inside;   // all its chunks lie in x, possibly in other rows

  __device__ __forceinline__ Source(const CopyTransposeArgs& args, int64_t matrix, int64_t row,
                                    int64_t column, int rows, int columns)
      : from(args.x + matrix * args.batch_stride + row * args.row_stride +
             column * args.column_stride),
        rows(rows),
        columns(columns),
        gathers(args.column_stride != kBytes),
        shift0(gathers ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16)),
        shift1(gathers ? 0 : static_cast<int>(args.row_stride % 16)) {
    const char* end = from + (rows - 1) * args.row_stride + columns * kBytes;
    inside = !gathers && from - shift0 >= args.x && end + 15 <= args.end;
  }
  __device__ __forceinline__ int shift(int row) const { return (shift0 + row * shift1) & 15; }

  // The rest, at the ends of x, is read element by element.
  static __device__ __forceinline__ bool whole(const CopyTransposeArgs& args, const char* chunk) {
    return chunk >= args.x && chunk + 16 <= args.end;
  }
};

template <int kThreads, int kBytes>
__device__ __forceinline__ void prefetch_tile(const CopyTransposeArgs& args,
                                              const Source<kBytes>& tile) {
  if (!is_prefetching(args.prefetch_blocks) || !tile.inside) return;
#pragma unroll 1
  for (int r = threadIdx.x; r < tile.rows; r += kThreads) {
    const int shift = tile.shift(r);
    bulk_prefetch(tile.from + (r * args.row_stride - shift),
                  (shift + tile.columns * kBytes + 15) & ~15);
  }
}

// Rows of chunks in shared memory: kMore more than in the tile.
template <int kBytes, int kTileRows, int kTileColumns, int kMore>
struct Staging {
  static constexpr int kPerChunk = 16 / kBytes;
  static constexpr int kRows = kTileRows + kMore;
  static constexpr int kLanes = kTileColumns / kPerChunk;  // per row
  static constexpr int kPitch = (kLanes + 1) * 16;         // a row may begin within a chunk
  static constexpr int kSize = kRows * kPitch + (kRows / kPerChunk + 1) * 16;

  static __device__ __forceinline__ int offset(int row) {
    return row * kPitch + row / kPerChunk * 16;
  }
};

// Loads a tile into shared memory.
template <int kThreads, typename Rows, int kBytes>
__device__ __forceinline__ void stage_tile(const CopyTransposeArgs& args,
                                           const Source<kBytes>& tile, char* staged) {
  using T = typename Element<kBytes>::Type;
  constexpr int kPerChunk = Rows::kPerChunk, kLanes = Rows::kLanes;
  const int rows = tile.rows, columns = tile.columns;
  if (tile.gathers) {
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * columns; i += kThreads) {
      const int row = i / columns, column = i - row * columns;
      *reinterpret_cast<T*>(staged + Rows::offset(row) + column * kBytes) =
          *reinterpret_cast<const T*>(tile.from + row * args.row_stride +
                                      column * args.column_stride);
    }
    return;
  }
  constexpr int kRowsAPass = kThreads / kLanes;
  constexpr int kPasses = (Rows::kRows + kRowsAPass - 1) / kRowsAPass;
  constexpr int kTogether = kPasses < 8 ? kPasses : 7;
  constexpr int kTogetherStep =
      kTogether * (kRowsAPass * Rows::kPitch + kRowsAPass / kPerChunk * 16);
  static_assert(kRowsAPass % kPerChunk == 0, "one shift of a thread's rows");
  const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes;
  const char* address = tile.from + row * args.row_stride;
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(address) % 16);
  address += lane * 16 - shift;
  const int64_t step = kRowsAPass * args.row_stride;
  int left = lane * 16 < shift + columns * kBytes ? rows - row : 0;  // of the lane's rows
  char* place = staged + Rows::offset(row) + lane * 16;
#pragma unroll 1
  for (int pass = 0; pass < kPasses && (pass == 0 || left > 0); pass += kTogether) {
    uint32_t words[kTogether][4];
    if (tile.inside) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i, address += step) {
        if (i * kRowsAPass < left) load_vector(words[i], address);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kTogether; ++i, address += step) {
        if (i * kRowsAPass < left && Source<kBytes>::whole(args, address)) {
          load_vector(words[i], address);
        }
      }
    }
    asm volatile("" ::: "memory");  // all loads before any store
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (i * kRowsAPass < left) store_vector(place + i * (kTogetherStep / kTogether), words[i]);
    }
    place += kTogetherStep;
    left -= kTogether * kRowsAPass;
  }
  if (columns * kBytes + (16 - kBytes) > kLanes * 16) {  // the last chunks of wide tiles
#pragma unroll 1
    for (int r = threadIdx.x; r < rows; r += kThreads) {
      const char* last = tile.from + (r * args.row_stride - tile.shift(r)) + kLanes * 16;
      if (tile.shift(r) + columns * kBytes <= kLanes * 16) continue;
      if (!Source<kBytes>::whole(args, last)) continue;
      uint32_t words[4];
      load_vector(words, last);
      store_vector(staged + Rows::offset(r) + kLanes * 16, words);
    }
  }
  if (tile.inside) return;
  __syncthreads();  // the code above has also written chunks of which parts were not read
#pragma unroll 1
  for (int r = threadIdx.x; r < rows; r += kThreads) {
    // Such chunks hold only a row's first and last elements, in few rows.
    const char* begin = tile.from + r * args.row_stride;
    const int shift = tile.shift(r), last = (shift + columns * kBytes - 1) / 16 * 16;
#pragma unroll 1
    for (int chunk = 0; chunk <= last; chunk += max(last, 16)) {
      if (Source<kBytes>::whole(args, begin - shift + chunk)) continue;
      char* to = staged + Rows::offset(r) + chunk;
#pragma unroll
      for (int at = 0; at < 16; at += kBytes) {
        if (chunk + at < shift || chunk + at >= shift + columns * kBytes) continue;
        *reinterpret_cast<T*>(to + at) = *reinterpret_cast<const T*>(begin - shift + chunk + at);
      }
    }
  }
}

// Assembles a chunk from elements at offsets `places` from `staged`.
template <int kBytes, int kPerChunk>
__device__ __forceinline__ void collect(uint32_t (&words)[4], const char* staged,
                                        const int (&places)[kPerChunk]) {
  using T = typename Element<kBytes>::Type;
#pragma unroll
  for (int e = 0; e < kPerChunk; ++e) {
    const uint32_t value = *reinterpret_cast<const T*>(staged + places[e]);
    constexpr uint32_t kInto[4] = {0x3214, 0x3240, 0x3410, 0x4210};  // selects the bytes
    const int at = e * kBytes % 4;
    uint32_t& word = words[e * kBytes / 4];
    if constexpr (kBytes == 4) {
      word = value;
    } else if constexpr (kBytes == 2) {
      word = at == 0 ? value : __byte_perm(word, value, 0x5410);
    } else {
      word = at == 0 ? value : __byte_perm(word, value, kInto[at]);
    }
  }
}

// Rows whose runs of out may need elements of the tile below.
template <int kBytes, int kTileRows, int kTileColumns>
struct RunStaging
    : Staging<kBytes, kTileRows, kTileColumns, copy_transpose_run(kBytes, kTileRows) / kBytes> {
  static constexpr int kRun = copy_transpose_run(kBytes, kTileRows);
};

template <int kBytes, int kTileRows, int kTileColumns, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    copy_transpose_realigned(const __grid_constant__ CopyTransposeArgs args) {
  using T = typename Element<kBytes>::Type;
  using Rows = RunStaging<kBytes, kTileRows, kTileColumns>;
  constexpr int kPerChunk = Rows::kPerChunk, kRun = Rows::kRun;
  constexpr int kOfColumn = kTileRows / kPerChunk;  // chunks
  constexpr int kDown = kOfColumn < 8 ? kOfColumn : 8, kAcross = 32 / kDown;
  constexpr int kGroups = kOfColumn / kDown;  // of lanes, per column
  constexpr int kStep = kAcross * (kThreads / 32 / kGroups);
  static_assert(kThreads / 32 % kGroups == 0 && kStep * kBytes % kRun == 0, "columns of one shift");
  extern __shared__ __align__(128) char staged[];

  // Starts with the last tile: tiles at the ends of x take longer, and so overlap the others.
  const Tile at = tile_of<true>(args, gridDim.x - 1 - blockIdx.x);
  const int64_t first_row = static_cast<int64_t>(at.row) * args.tile_height;
  const int64_t first_column = static_cast<int64_t>(at.column) * args.tile_width;
  const int64_t out_stride = args.rows * kBytes;
  char* to = args.out + (at.matrix * args.columns + first_column) * out_stride + first_row * kBytes;
  const int to_shift = static_cast<int>(reinterpret_cast<uintptr_t>(to) % kRun);
  const int out_shift = static_cast<int>(out_stride % kRun);
  const int more = (to_shift | out_shift) == 0 ? 0 : kRun / kBytes;
  const int rows = static_cast<int>(min(args.rows - first_row, int64_t{args.tile_height + more}));
  const int columns = static_cast<int>(min(args.columns - first_column, int64_t{args.tile_width}));
  const Source<kBytes> tile(args, at.matrix, first_row, first_column, rows, columns);
  prefetch_tile<kThreads>(args, tile);
  grid_dependency_wait();
  grid_dependency_launch();
  stage_tile<kThreads, Rows>(args, tile, staged);

  // The chunks of out that begin in this tile. The first tile also writes the elements before them;
  // the last tile ends within a chunk.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int mine = warp / kGroups * kAcross + lane / kDown;  // the thread's first column
  const int down = (warp % kGroups * kDown + lane % kDown) * kPerChunk;
  // From its first run on.
  const int first = ((-(to_shift + mine * out_shift) & (kRun - 1)) / kBytes) + down;
  int places[kPerChunk];
#pragma unroll
  for (int e = 0; e < kPerChunk; ++e) {
    places[e] = Rows::offset(first + e) + tile.shift(first + e) + mine * kBytes;
  }
  char* chunk = to + mine * out_stride + first * kBytes;
  __syncthreads();

  if (down < args.tile_height && first + kPerChunk <= rows) {
#pragma unroll 4
    for (int j = 0; j < (kTileColumns + kStep - 1) / kStep; ++j) {
      if (mine + j * kStep >= columns) break;
      uint32_t words[4];
      collect<kBytes>(words, staged + j * kStep * kBytes, places);
      store_vector(chunk, words);
      chunk += kStep * out_stride;
    }
  } else if (down < args.tile_height) {
#pragma unroll 1
    for (int column = mine; column < columns; column += kStep) {
#pragma unroll 1
      for (int row = first; row < rows; ++row) {
        *reinterpret_cast<T*>(to + column * out_stride + row * kBytes) =
            *reinterpret_cast<const T*>(staged + Rows::offset(row) + tile.shift(row) +
                                        column * kBytes);
      }
    }
  }
  if (at.row != 0 || more == 0) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < columns * more; i += kThreads) {
    const int column = i / more, row = i % more;
    const int before = -(to_shift + column * out_shift) & (kRun - 1);
    if (row >= before / kBytes || row >= rows) continue;
    *reinterpret_cast<T*>(to + column * out_stride + row * kBytes) =
        *reinterpret_cast<const T*>(staged + Rows::offset(row) + tile.shift(row) + column * kBytes);
  }
}

}  // namespace tiercel

#endif  // KERNELS_TRANSPOSE_REALIGNED_CUH_
