// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/quant_checks.h"

namespace tiercel {

Status check_rows_of_vectors(const Argument& argument) {
  const TensorView& view = argument.view;
  const int64_t element = dtype_bytes(view.dtype);
  const int64_t rows = view.shape[0];
  const int64_t columns = view.shape[1];
  if (rows == 0 || columns == 0) return Status();
  const bool neighbours = columns == 1 || view.strides[1] == 1;
  const bool aligned = reinterpret_cast<uintptr_t>(view.data) % 16 == 0 &&
                       (rows == 1 || view.strides[0] * element % 16 == 0);
  if (neighbours && aligned) return Status();
  return Status::Unimplemented(
      mismatch(argument, "have rows of neighbouring values at multiples of 16 bytes",
               "strides " + shape_text(view.strides, view.ndim) +
                   (neighbours ? " and an address or rows off that" : "")));
}

Status check_aligned(const Argument& argument, int bytes) {
  TIERCEL_RETURN_IF_ERROR(check_contiguous(argument));
  if (reinterpret_cast<uintptr_t>(argument.view.data) % bytes == 0) return Status();
  return Status::Unimplemented(
      mismatch(argument, "begin at a multiple of " + std::to_string(bytes) + " bytes",
               "an address that is not"));
}

bool is_flat(const TensorView& rows) {
  return rows.shape[0] <= 1 || rows.strides[0] == rows.shape[1];
}

}  // namespace tiercel
