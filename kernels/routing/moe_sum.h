// SPDX-License-Identifier: Apache-2.0
// The outputs of each token's experts, added up.
#ifndef KERNELS_ROUTING_MOE_SUM_H_
#define KERNELS_ROUTING_MOE_SUM_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// What a call would launch.
struct MoeSumCall {
  const TensorView* x = nullptr;
  const TensorView* weights = nullptr;  // or null
  const TensorView* out = nullptr;
};

struct MoeSumPlan {
  const char* kernel;  // "none" for an empty output
  int vector_bytes;
  unsigned grid_x, grid_y;
  unsigned block_x, block_y;
};

// x [T, k, H] float32, bfloat16 or float16, any strides; weights [T, k] float32, contiguous, or
// null for 1; out [T, H] of x's dtype, contiguous. out = sum over k of weights * x, in float32, in
// order, rounded once.

// All checks and the choice of kernel; needs no GPU and no driver.
Status moe_sum_plan(const MoeSumCall& call, MoeSumPlan* plan);

// Checks and chooses likewise, then launches on `stream` (a CUstream) of the tensors' device.
Status moe_sum(const MoeSumCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_ROUTING_MOE_SUM_H_
