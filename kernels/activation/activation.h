// SPDX-License-Identifier: Apache-2.0
// Activations, plain and gated, forward and backward.
#ifndef KERNELS_ACTIVATION_ACTIVATION_H_
#define KERNELS_ACTIVATION_ACTIVATION_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

enum class ActivationFunction : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3 };

// The launch of a call.
struct ActivationPlan {
  const char* kernel;  // "none" if there are no elements
  int64_t rows;        // after neighbouring rows have been joined
  int64_t columns;
  bool aligned;  // 16-byte loads
  unsigned grid;
  unsigned block;
};

// One call; the pointers of tensors that a form does not have are null.
//   plain:        out = f(x)
//   gated, pair:  out = f(x) * up
//   gated, packed (`up` null): out = f(x[..., :N]) * x[..., N:]
// x is float32, bfloat16 or float16, of any rank; its rows are contiguous and a constant stride
// apart. `up` has x's shape and dtype. `out` is contiguous and has x's dtype, or float8_e4m3fn with
// `scale` (one float32): then the result is divided by `scale` and saturated at 448.
struct ActivationCall {
  ActivationFunction function = ActivationFunction::kSilu;
  bool gated = false;
  const TensorView* x = nullptr;
  const TensorView* up = nullptr;
  const TensorView* scale = nullptr;
  const TensorView* out = nullptr;
};

// The backward of these forms: `grad` has the shape of `out`; `x_grad` and `up_grad` are contiguous
// and have the shapes of x and up. Gated forms may also compute the forward's result again, into
// `out`, contiguous.
struct ActivationBackwardCall {
  ActivationFunction function = ActivationFunction::kSilu;
  bool gated = false;
  const TensorView* grad = nullptr;
  const TensorView* x = nullptr;
  const TensorView* up = nullptr;
  const TensorView* x_grad = nullptr;
  const TensorView* up_grad = nullptr;
  const TensorView* out = nullptr;
};

// The public operator's name: "silu_and_mul", "gelu", ...
const char* activation_op_name(ActivationFunction function, bool gated);

// Checks the call and chooses the kernel; needs no GPU and no driver.
Status activation_plan(const ActivationCall& call, ActivationPlan* plan);
Status activation_backward_plan(const ActivationBackwardCall& call, ActivationPlan* plan);

// Also launches, on `stream` (a CUstream of the tensors' device).
Status activation(const ActivationCall& call, void* stream);
Status activation_backward(const ActivationBackwardCall& call, void* stream);

// Loads an operator's forward and backward kernels on a device.
Status activation_load(ActivationFunction function, bool gated, int device);

}  // namespace tiercel

#endif  // KERNELS_ACTIVATION_ACTIVATION_H_
