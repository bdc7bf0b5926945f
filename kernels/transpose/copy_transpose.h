// SPDX-License-Identifier: Apache-2.0
// A matrix, or each matrix of a batch, with rows and columns exchanged, as a new contiguous tensor.
#ifndef KERNELS_TRANSPOSE_COPY_TRANSPOSE_H_
#define KERNELS_TRANSPOSE_COPY_TRANSPOSE_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// What a call would launch.
struct CopyTransposeCall {
  const TensorView* x = nullptr;
  const TensorView* out = nullptr;
  int64_t tile_size = 0;  // 0: chosen
};

struct CopyTransposePlan {
  const char* kernel;  // "none" where there is nothing to copy
  int tile_rows;
  int tile_columns;
  int vector_bytes;  // what both sides must be aligned to; an element's size: nothing
  unsigned grid;
  unsigned block;
};

// x [M, N] or [B, M, N], elements of 1, 2 or 4 bytes, any strides; out [N, M] or [B, N, M],
// contiguous, of x's dtype. `tile_size` is the edge, in elements, of the square that a block of
// threads turns: 32, 64 or 128; 0 chooses the tile.

// All checks and the choice of kernel; needs no GPU and no driver.
Status copy_transpose_plan(const CopyTransposeCall& call, CopyTransposePlan* plan);

// Checks and chooses likewise, then launches on `stream` (a CUstream) of the tensors' device.
Status copy_transpose(const CopyTransposeCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_TRANSPOSE_COPY_TRANSPOSE_H_
