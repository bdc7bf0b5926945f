// SPDX-License-Identifier: Apache-2.0
#include "kernels/moe/moe_checks.h"

#include "kernels/sm90/math.h"

namespace tiercel {

Status check_rows(const Argument& argument) {
  const TensorView& view = argument.view;
  const int last = view.ndim - 1;
  bool fits = view.strides[last] == 1 || view.shape[last] <= 1;
  for (int i = 0; i < last; ++i) {
    fits = fits && (view.shape[i] <= 1 || view.strides[i] * dtype_bytes(view.dtype) % 16 == 0);
  }
  fits = fits && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  if (fits) return Status();
  return Status::Unimplemented(
      mismatch(argument, "have rows of neighbouring elements at multiples of 16 bytes",
               "strides " + shape_text(view.strides, view.ndim)));
}

Status check_beside(const Argument& argument, const Argument& x) {
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, x));
  return check_cuda(argument);
}

Status check_scale(const Argument& scale, const Argument& x) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(scale, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_beside(scale, x));
  return check_contiguous(scale);
}

Status check_weights_scale(const Argument& scale, const TensorView& w) {
  if (scale.view.ndim == 3) {
    const auto blocks = [](int64_t size) { return ceil_div(size, kScaleBlock); };
    return check_shape(scale, {w.shape[0], blocks(w.shape[1]), blocks(w.shape[2])},
                       "[E, rows of weights / 128, columns / 128]");
  }
  TIERCEL_RETURN_IF_ERROR(check_rank(scale, 2));
  if (scale.view.shape[1] == 1) return check_shape(scale, {w.shape[0], 1}, "[E, 1]");
  return check_shape(scale, {w.shape[0], w.shape[1]}, "[E, rows of weights]");
}

}  // namespace tiercel
