// SPDX-License-Identifier: Apache-2.0
// What copy_transpose's launcher and its device code agree on: the kernels' argument and the table
// of kernels.
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
  int64_t column_stride;  // bytes, of x; an element's size in kernels that read vectors
  int64_t batch_stride;   // bytes, of x
  int tile_rows;          // tiles of a matrix, down and across
  int tile_columns;
  int tile_height;  // of a tile, in elements: in kernels that realign less than the most at times
  int tile_width;
  int ahead;        // so many blocks ask for their data before they may read it
  int group;        // columns that are whole chunks together, in kernels of whole columns
  const char* end;  // behind x's last element
};

// What runs of out begin at multiples of, in kernels that realign: whole sectors of memory, where a
// tile of so many rows is some times as high. Its height is such a multiple too.
constexpr int copy_transpose_run(int element_bytes, int tile_rows) {
  return tile_rows >= 64 && element_bytes * tile_rows >= 128 && element_bytes * tile_rows % 32 == 0
             ? 32
             : 16;
}

struct CopyTransposeKernel {
  int element_bytes;
  int tile_rows;  // elements, at most
  int tile_columns;
  int vector_bytes;  // of loads and stores; both sides must allow it
  bool whole;        // of whole columns, of up to tile_rows elements
  unsigned block;
  unsigned dynamic_smem;
  Kernel kernel;
};

const CopyTransposeKernel* copy_transpose_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_TRANSPOSE_COPY_TRANSPOSE_KERNELS_H_
