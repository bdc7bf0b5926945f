// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/tensor_map.h"

#include <string>

#include "kernels/sm90/checks.h"
#include "kernels/sm90/context.h"
#include "kernels/sm90/driver.h"

namespace tiercel {
namespace {

constexpr int64_t kAlignment = 16;  // bytes

CUtensorMapDataType data_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kFloat64:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
    case DType::kInt32:
      return CU_TENSOR_MAP_DATA_TYPE_INT32;
    case DType::kInt64:
      return CU_TENSOR_MAP_DATA_TYPE_INT64;
    case DType::kInt16:
      return CU_TENSOR_MAP_DATA_TYPE_UINT16;  // TMA copies bits
    default:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

}  // namespace

Status check_tensor_map(const TensorMapSpec& spec, const TensorView& view, const char* op,
                        const char* name) {
  const Argument argument{op, name, view};
  TIERCEL_RETURN_IF_ERROR(check_rank(argument, spec.rank));
  const int64_t element = dtype_bytes(view.dtype);
  if (reinterpret_cast<uintptr_t>(view.data) % kAlignment != 0) {
    return Status::Unimplemented(mismatch(
        argument, "start at a multiple of 16 bytes",
        "an address that is " +
            std::to_string(reinterpret_cast<uintptr_t>(view.data) % kAlignment) + " bytes off"));
  }
  for (int i = 0; i < spec.rank; ++i) {
    if (view.shape[i] < 1 || view.shape[i] > INT32_MAX) {
      return Status::Unimplemented(mismatch(argument, "have dimensions from 1 to 2^31 - 1",
                                            "shape " + shape_text(view.shape, view.ndim)));
    }
    const bool last = i == spec.rank - 1;
    const int64_t stride = view.strides[i];
    if (last ? stride != 1 && view.shape[i] != 1
             : view.shape[i] != 1 && (stride < 1 || stride * element % kAlignment != 0)) {
      return Status::Unimplemented(
          mismatch(argument,
                   last ? "be contiguous in its last dimension"
                        : "have row strides that are multiples of 16 bytes",
                   "strides " + shape_text(view.strides, view.ndim) + " of " +
                       std::to_string(element) + "-byte elements"));
    }
  }
  return Status();
}

Status encode_tensor_map(const TensorMapSpec& spec, const TensorView& view, const char* op,
                         const char* name, CUtensorMap* map) {
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(spec, view, op, name));
  ContextScope context;
  TIERCEL_RETURN_IF_ERROR(context.enter(view.device_index));
  const int64_t element = dtype_bytes(view.dtype);
  // TMA counts dimensions from the innermost.
  cuuint64_t dims[kTensorMapMaxRank], strides[kTensorMapMaxRank];
  cuuint32_t box[kTensorMapMaxRank], steps[kTensorMapMaxRank];
  cuuint64_t packed = static_cast<cuuint64_t>(element);
  for (int i = 0; i < spec.rank; ++i) {
    const int from = spec.rank - 1 - i;
    dims[i] = static_cast<cuuint64_t>(view.shape[from]);
    box[i] = spec.box[from];
    steps[i] = 1;
    if (i > 0) {
      // In torch, a dimension of size 1 may have any stride; TMA requires a valid one.
      strides[i - 1] = view.shape[from] == 1
                           ? (packed + kAlignment - 1) / kAlignment * kAlignment
                           : static_cast<cuuint64_t>(view.strides[from] * element);
    }
    packed *= dims[i];
  }
  const CUresult result = driver_api().tensor_map_encode_tiled(
      map, data_type(view.dtype), static_cast<cuuint32_t>(spec.rank), view.data, dims, strides, box,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, spec.swizzle, spec.l2_promotion,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return Status();
  return Status::RuntimeError(std::string(op) + ": the tensor map of `" + name +
                              "` could not be encoded: " + driver_error_text(result));
}

}  // namespace tiercel
