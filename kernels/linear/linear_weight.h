// SPDX-License-Identifier: Apache-2.0
// The gradient of a weight from float8 operands.
#ifndef KERNELS_LINEAR_LINEAR_WEIGHT_H_
#define KERNELS_LINEAR_LINEAR_WEIGHT_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// out[N, K] = grad[N, P] @ x[K, P]^T, float32 sums, with float32 scales of 1x128 values of both:
// [ceil(P / 128), N] and [ceil(P / 128), K] with any strides. grad and x are float8_e4m3fn,
// contiguous in their last dimension; their rows may have any distance that is a multiple of 16
// bytes. out is contiguous, float32 or bfloat16. K is a multiple of 8, P of 16.
// `add`: the products are added to out, which is float32.
// An empty P has no launch: out is what it was.
struct LinearWeightCall {
  const TensorView* grad = nullptr;
  const TensorView* x = nullptr;
  const TensorView* grad_scale = nullptr;
  const TensorView* x_scale = nullptr;
  const TensorView* out = nullptr;
  bool add = false;
};

// The first launch that a call would make.
struct LinearWeightPlan {
  const char* kernel;  // "none" for an empty result, or no tokens
  int tile_m;
  int tile_n;
  int cluster;
  int group;  // rows of clusters that are worked on together
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
  int64_t rows;  // of the gradient; a second launch, of other tiles, computes the others
};

// All checks and the choice of kernel for a device with that many multiprocessors; needs no GPU and
// no driver.
Status linear_weight_plan(const LinearWeightCall& call, int multiprocessors,
                          LinearWeightPlan* plan);

// Plans for the tensors' device, then launches on `stream` (a CUstream).
Status linear_weight(const LinearWeightCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_LINEAR_LINEAR_WEIGHT_H_
