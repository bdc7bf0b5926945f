// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/linear_checks.h"

#include <string>

#include "kernels/sm90/tensor_map.h"

namespace tiercel {
namespace {

// TMA moves 16 bytes at a time.
constexpr int64_t kAlignedBytes = 16;

}  // namespace

Status check_multiple(const Argument& argument, int64_t size, const char* letter, DType dtype) {
  const int64_t unit = kAlignedBytes / dtype_bytes(dtype);
  if (size > 0 && size % unit == 0 && size <= INT32_MAX) return Status();
  return Status::Unimplemented(mismatch(
      argument, "have a multiple of " + std::to_string(unit) + " as its dimension " + letter,
      std::to_string(size) + " (shape " + shape_text(argument.view.shape, argument.view.ndim) +
          ")"));
}

Status check_matrix(const Argument& argument, int64_t rows, int64_t columns, const char* why,
                    const Argument& first, DType dtype) {
  TIERCEL_RETURN_IF_ERROR(check_rank(argument, 2));
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {rows, columns}, why));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, first));
  return check_cuda(argument);
}

Status check_maps(std::initializer_list<Argument> arguments) {
  const TensorMapSpec matrix{
      2, {64, 64}, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE};
  for (const Argument& argument : arguments) {
    TIERCEL_RETURN_IF_ERROR(check_tensor_map(matrix, argument.view, argument.op, argument.name));
  }
  return Status();
}

Status check_block_scale(const Argument& argument, int64_t rows, int64_t columns, const char* why,
                         const Argument& x) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {rows, columns}, why));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, x));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  for (int dim : {0, 1}) {
    const int64_t stride = argument.view.strides[dim];
    if (argument.view.shape[dim] > 1 && (stride < 0 || stride > INT32_MAX)) {
      return Status::Unimplemented(
          mismatch(argument, "have strides from 0 to 2^31 - 1", std::to_string(stride)));
    }
  }
  return Status();
}

}  // namespace tiercel
