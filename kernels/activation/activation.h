// SPDX-License-Identifier: Apache-2.0
// Activations, plain and gated, forward and backward.
#ifndef KERNELS_ACTIVATION_ACTIVATION_H_
#define KERNELS_ACTIVATION_ACTIVATION_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

enum class ActivationFunction : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3 };

// What a call would launch.
struct ActivationPlan {
  const char* kernel;  // "none" where there are no elements
  int64_t rows;        // after neighbouring rows have been joined
  int64_t columns;
  bool aligned;  // 16-byte loads
  unsigned grid;
  unsigned block;
};

// One call; pointers that a form has no tensor for are null.
//   plain:        out = f(x)
//   gated, pair:  out = f(x) * up
//   gated, packed (`up` null): out = f(x[..., :N]) * x[..., N:]
// x is float32, bfloat16 or float16; any number of dimensions whose leading ones have one distance
// between rows, with neighbouring elements in the last; `up` has x's shape and dtype. `out` is
// contiguous, of x's dtype, or float8_e4m3fn with `scale`: one float32; then f's result is divided
// by it and values beyond 448 become 448.
struct ActivationCall {
  ActivationFunction function = ActivationFunction::kSilu;
  bool gated = false;
  const TensorView* x = nullptr;
  const TensorView* up = nullptr;
  const TensorView* scale = nullptr;
  const TensorView* out = nullptr;
};

// The same forms, backward: `grad` is of `out`'s shape, `x_grad` and `up_grad` are contiguous, of
// the shapes of x and up.
struct ActivationBackwardCall {
  ActivationFunction function = ActivationFunction::kSilu;
  bool gated = false;
  const TensorView* grad = nullptr;
  const TensorView* x = nullptr;
  const TensorView* up = nullptr;
  const TensorView* x_grad = nullptr;
  const TensorView* up_grad = nullptr;
};

// The public operator of a form: "silu_and_mul", "gelu", ...
const char* activation_op_name(ActivationFunction function, bool gated);

// All checks and the choice of kernel; needs no GPU and no driver.
Status activation_plan(const ActivationCall& call, ActivationPlan* plan);
Status activation_backward_plan(const ActivationBackwardCall& call, ActivationPlan* plan);

// The same, then the launch on `stream` (a CUstream) of the tensors' device.
Status activation(const ActivationCall& call, void* stream);
Status activation_backward(const ActivationBackwardCall& call, void* stream);

// Loads the kernels of an operator's function on a device, those of the backward too.
Status activation_load(ActivationFunction function, bool gated, int device);

}  // namespace tiercel

#endif  // KERNELS_ACTIVATION_ACTIVATION_H_
