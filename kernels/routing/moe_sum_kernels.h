// SPDX-License-Identifier: Apache-2.0
// The interface of moe_sum's host and device code.
#ifndef KERNELS_ROUTING_MOE_SUM_KERNELS_H_
#define KERNELS_ROUTING_MOE_SUM_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct MoeSumArgs {
  const char* x;
  const float* weights;  // [rows, k] or null
  char* out;             // [rows, columns], contiguous
  int64_t row_stride;    // bytes
  int64_t expert_stride;
  int64_t column_stride;
  int64_t rows;
  int columns;  // in vectors
  int k;
  bool early_launch;  // see grid_dependency_wait_and_launch()
};

struct MoeSumKernel {
  DType dtype;
  int k;             // 0: any
  int vector_bytes;  // 16, or one element
  Kernel kernel;
};

// The first kernel that fits a call is used.
const MoeSumKernel* moe_sum_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_ROUTING_MOE_SUM_KERNELS_H_
