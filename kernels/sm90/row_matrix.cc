// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/row_matrix.h"

#include <string>

namespace tiercel {
namespace {

std::string expected_shape(const TensorView& like, int64_t last) {
  std::string text = "[";
  for (int i = 0; i + 1 < like.ndim; ++i) text += std::to_string(like.shape[i]) + ", ";
  return like.ndim == 0 ? "[]" : text + std::to_string(last) + "]";
}

}  // namespace

Status join_leading(const Argument& argument, RowMatrix* matrix) {
  const TensorView& view = argument.view;
  if (view.ndim == 0) return Status();
  const int last = view.ndim - 1;
  matrix->columns = view.shape[last];
  for (int i = 0; i <= last; ++i) {
    if (view.shape[i] != 0) continue;
    matrix->rows = 0;  // whatever the strides
    return Status();
  }
  for (int i = last - 1; i >= 0; --i) {
    if (view.shape[i] == 1) continue;
    if (matrix->rows == 1) {
      matrix->row_stride = view.strides[i];
    } else if (view.strides[i] != matrix->row_stride * matrix->rows) {
      return Status::Unimplemented(mismatch(argument, "have rows at one distance",
                                            "strides " + shape_text(view.strides, view.ndim) +
                                                " for shape " + shape_text(view.shape, view.ndim)));
    }
    matrix->rows *= view.shape[i];
  }
  return Status();
}

Status join_rows(const Argument& argument, RowMatrix* matrix) {
  TIERCEL_RETURN_IF_ERROR(join_leading(argument, matrix));
  const TensorView& view = argument.view;
  const int last = view.ndim - 1;
  if (last < 0 || matrix->rows == 0) return Status();
  if (view.shape[last] > 1 && view.strides[last] != 1) {
    return Status::Unimplemented(mismatch(argument, "be contiguous in its last dimension",
                                          "strides " + shape_text(view.strides, view.ndim)));
  }
  return Status();
}

Status check_shape_like(const Argument& argument, const TensorView& like, int64_t last,
                        const char* why) {
  const TensorView& view = argument.view;
  bool same = view.ndim == like.ndim;
  for (int i = 0; same && i < view.ndim; ++i) {
    same = view.shape[i] == (i == view.ndim - 1 ? last : like.shape[i]);
  }
  if (same) return Status();
  return Status::InvalidArgument(
      mismatch(argument, std::string("have shape ") + why + " = " + expected_shape(like, last),
               shape_text(view.shape, view.ndim)));
}

int64_t last_size(const TensorView& view) { return view.ndim == 0 ? 1 : view.shape[view.ndim - 1]; }

}  // namespace tiercel
