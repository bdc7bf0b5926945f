// SPDX-License-Identifier: Apache-2.0
// The gradients of qk_norm_rope: of queries, keys and the weights of their norms.
#ifndef KERNELS_ROTARY_QK_NORM_ROPE_BACKWARD_H_
#define KERNELS_ROTARY_QK_NORM_ROPE_BACKWARD_H_

#include "kernels/rotary/qk_heads.h"
#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct QkNormRopeBackwardCall {
  QkHeads heads;
  const TensorView* grad_q_out = nullptr;     // as q
  const TensorView* grad_k_out = nullptr;     // as k
  const TensorView* grad_q = nullptr;         // as q
  const TensorView* grad_k = nullptr;         // as k
  const TensorView* grad_q_weight = nullptr;  // as q_weight, or null: not wanted
  const TensorView* grad_k_weight = nullptr;
  const TensorView* workspace = nullptr;  // [parts, D] float32 if a weight's gradient is wanted
};

struct QkNormRopeBackwardPlan {
  const char* kernel;  // "none" for an empty batch
  unsigned lanes;      // per head
  unsigned grid;
  unsigned block;
  unsigned parts;  // rows of the workspace
};

// With g, the gradient of a result turned back, and r = 1 / sqrt(mean(x^2) + eps), the gradient of
// a head x is r * (g * w - x * r^2 * mean(g * w * x)) and that of its weight w the sum of g * x * r
// over tokens and heads; without a weight the gradient is g. Arithmetic is float32, results are
// rounded once, and sums are added in an order that depends on the shapes alone.

// All checks and the choice of kernel; needs no GPU and no driver, and no workspace.
Status qk_norm_rope_backward_plan(const QkNormRopeBackwardCall& call, QkNormRopeBackwardPlan* plan);

// Checks and chooses likewise, then launches on `stream` (a CUstream) of the tensors' device.
Status qk_norm_rope_backward(const QkNormRopeBackwardCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_ROTARY_QK_NORM_ROPE_BACKWARD_H_
