// SPDX-License-Identifier: Apache-2.0
// The interface of target_rows's host and device code: the kernels' arguments and table.
#ifndef KERNELS_LOSS_TARGET_ROWS_KERNELS_H_
#define KERNELS_LOSS_TARGET_ROWS_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct TargetRowsArgs {
  char* sums;
  const char* x;
  int64_t sums_stride;  // bytes
  int64_t x_stride;     // bytes
  const int32_t* target;
  const int64_t* order;
  const float* by;
  int32_t tokens;
  int32_t columns;
  int64_t rows;  // of sums
};

struct TargetRowsKernel {
  DType dtype;
  int elements;  // of a thread: those of a vector, or one
  Kernel kernel;
};

inline constexpr int kTargetRowsThreads = 256;

const TargetRowsKernel* target_rows_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_LOSS_TARGET_ROWS_KERNELS_H_
