// SPDX-License-Identifier: Apache-2.0
// The interface of fp8_quantize_transpose's host and device code.
#ifndef KERNELS_QUANT_FP8_TRANSPOSE_KERNELS_H_
#define KERNELS_QUANT_FP8_TRANSPOSE_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct Fp8TransposeArgs {
  const char* x;
  int64_t row_bytes;  // from one row of x to the next
  char* q;            // contiguous, as all results
  char* q_t;
  float* scale;
  float* scale_t;
  int64_t rows;
  int64_t columns;
  int row_tiles;  // of 128 rows
  int column_tiles;
  int prefetch_blocks;  // blocks that prefetch their data to L2 before they may read it
  bool tiles;           // a scale per tile; otherwise per 128 of a row, and per 128 of a column
};

inline constexpr int kFp8TransposeThreads = 256;

struct Fp8TransposeKernel {
  DType dtype;  // of x
  Kernel kernel;
};

const Fp8TransposeKernel* fp8_transpose_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_QUANT_FP8_TRANSPOSE_KERNELS_H_
