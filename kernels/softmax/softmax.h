// SPDX-License-Identifier: Apache-2.0
// softmax and log_softmax along the last dimension, forward and backward.
#ifndef KERNELS_SOFTMAX_SOFTMAX_H_
#define KERNELS_SOFTMAX_SOFTMAX_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// The launch of a call.
struct SoftmaxPlan {
  const char* kernel;  // "none" if there are no elements
  int threads_per_row;
  int blocks_per_row;  // more than 1: a cluster; 0: several rows per block
  bool vectors;        // 16-byte loads
  unsigned grid;
  unsigned block;
};

// out = softmax(scores) per row, or its logarithm. The scores are scale * x, scale * x + mask or,
// with a bool mask, scale * x where it is true and -inf elsewhere. x is float32, bfloat16 or
// float16, of any rank; its rows are contiguous and a constant stride apart. `mask` has x's shape,
// with stride 0 in broadcast dimensions: bool, x's dtype or float32. `out` is contiguous, of x's
// shape and dtype.
struct SoftmaxCall {
  bool log = false;
  float scale = 1.0f;
  const TensorView* x = nullptr;
  const TensorView* mask = nullptr;  // or null
  const TensorView* out = nullptr;
};

// Computes x_grad from `grad`, the gradient of the result `y`. `mask` is bool or null; the gradient
// is 0 where it is false.
struct SoftmaxBackwardCall {
  bool log = false;
  float scale = 1.0f;
  const TensorView* grad = nullptr;
  const TensorView* y = nullptr;
  const TensorView* mask = nullptr;
  const TensorView* x_grad = nullptr;
};

// Checks the call and chooses the kernel for a whole GPU (on a share of one, clusters have at most
// 8 blocks instead of 16); needs no GPU and no driver.
Status softmax_plan(const SoftmaxCall& call, SoftmaxPlan* plan);
Status softmax_backward_plan(const SoftmaxBackwardCall& call, SoftmaxPlan* plan);

// Also launches, on `stream` (a CUstream of the tensors' device).
Status softmax(const SoftmaxCall& call, void* stream);
Status softmax_backward(const SoftmaxBackwardCall& call, void* stream);

// Loads all kernels on a device.
Status softmax_load(int device);

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_SOFTMAX_H_
