// SPDX-License-Identifier: Apache-2.0
// softmax and log_softmax along the last dimension, forward and backward.
#ifndef KERNELS_SOFTMAX_SOFTMAX_H_
#define KERNELS_SOFTMAX_SOFTMAX_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// What a call would launch.
struct SoftmaxPlan {
  const char* kernel;  // "none" where there are no elements
  int threads_per_row;
  int blocks_per_row;  // more than 1: a cluster; 0: several rows a block
  bool vectors;        // 16-byte loads
  unsigned grid;
  unsigned block;
};

// out = softmax(scale * x) of each row, or its logarithm; with a mask: of scale * x + mask, or, of
// a bool mask, of scale * x where it is true and of -inf elsewhere.
// x is float32, bfloat16 or float16; any number of dimensions whose leading ones have one distance
// between rows, with neighbouring elements in the last. `mask` has x's shape, with stride 0 where
// it is broadcast: bool, x's dtype or float32. `out` is contiguous, of x's shape and dtype.
struct SoftmaxCall {
  bool log = false;
  float scale = 1.0f;
  const TensorView* x = nullptr;
  const TensorView* mask = nullptr;  // or null
  const TensorView* out = nullptr;
};

// x_grad from `grad`, the gradient of the result `y`. `mask`: a bool one, or null; where it is
// false there is no gradient.
struct SoftmaxBackwardCall {
  bool log = false;
  float scale = 1.0f;
  const TensorView* grad = nullptr;
  const TensorView* y = nullptr;
  const TensorView* mask = nullptr;
  const TensorView* x_grad = nullptr;
};

// All checks and the choice of kernel, for a whole GPU (a share of one gets clusters of 8 blocks
// instead of 16); needs no GPU and no driver.
Status softmax_plan(const SoftmaxCall& call, SoftmaxPlan* plan);
Status softmax_backward_plan(const SoftmaxBackwardCall& call, SoftmaxPlan* plan);

// The same, then the launch on `stream` (a CUstream) of the tensors' device.
Status softmax(const SoftmaxCall& call, void* stream);
Status softmax_backward(const SoftmaxBackwardCall& call, void* stream);

// Loads all kernels on a device.
Status softmax_load(int device);

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_SOFTMAX_H_
