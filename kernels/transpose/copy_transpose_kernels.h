// SPDX-License-Identifier: Apache-2.0
// The interface of copy_transpose's host and device code: the kernels' argument and table.
#ifndef KERNELS_TRANSPOSE_COPY_TRANSPOSE_KERNELS_H_
#define KERNELS_TRANSPOSE_COPY_TRANSPOSE_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"

namespace tiercel {

struct CopyTransposeArgs {
  const char* x;
  char* out;
  int64_t rows;
  int64_t columns;
  int64_t row_stride;     // bytes, of x
  int64_t column_stride;  // bytes, of x; the element size in kernels that read vectors
  int64_t batch_stride;   // bytes, of x
  int tile_rows;          // tiles per matrix, down and across
  int tile_columns;
  int tile_height;  // of a tile, in elements; may be below the maximum in realigned kernels
  int tile_width;
  int prefetch_blocks;  // blocks that prefetch their data to L2 before they may read it
  int group;            // columns that together are whole chunks, in kernels of whole columns
  const char* end;      // behind x's last element
};

// In realigned kernels, runs of out begin at multiples of this many bytes, whole memory sectors if
// a tile is several times as high. A tile's height is such a multiple too.
constexpr int copy_transpose_run(int element_bytes, int tile_rows) {
  return tile_rows >= 64 && element_bytes * tile_rows >= 128 && element_bytes * tile_rows % 32 == 0
             ? 32
             : 16;
}

struct CopyTransposeKernel {
  int element_bytes;
  int tile_rows;  // elements, at most
  int tile_columns;
  int vector_bytes;  // per load and store; both sides must allow it
  bool whole;        // whole columns, of up to tile_rows elements
  unsigned block;
  unsigned dynamic_smem;
  Kernel kernel;
};

const CopyTransposeKernel* copy_transpose_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_TRANSPOSE_COPY_TRANSPOSE_KERNELS_H_
