// SPDX-License-Identifier: Apache-2.0
// A non-owning view of a tensor: pointer, dtype, device, shape, strides.
#ifndef KERNELS_SM90_TENSOR_VIEW_H_
#define KERNELS_SM90_TENSOR_VIEW_H_

#include <cstdint>

namespace tiercel {

enum class DType : uint8_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt32,
  kInt64,
  kInt16,
  kInt8,
  kUInt8,
  kBool,
  kFloat64,
  kFloat8E4M3,
  kFloat8E5M2,
  kFloat4E2M1x2,  // two values per byte; shapes and strides count bytes, as torch's do
  kUnknown,
};

// The values are DLPack's.
enum class DeviceType : int32_t { kOther = 0, kCPU = 1, kCUDA = 2 };

struct TensorView {
  void* data;
  DType dtype;
  DeviceType device_type;
  int32_t device_index;
  int32_t ndim;
  const int64_t* shape;
  const int64_t* strides;  // in elements; never null
};

constexpr int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
      return 2;
    case DType::kUnknown:
      return 0;
    default:
      return 1;
  }
}

// torch's names, for messages.
constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kInt16:
      return "int16";
    case DType::kInt8:
      return "int8";
    case DType::kUInt8:
      return "uint8";
    case DType::kBool:
      return "bool";
    case DType::kFloat64:
      return "float64";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
    case DType::kFloat8E5M2:
      return "float8_e5m2";
    case DType::kFloat4E2M1x2:
      return "float4_e2m1fn_x2";
    case DType::kUnknown:
      break;
  }
  return "an unsupported dtype";
}

}  // namespace tiercel

#endif  // KERNELS_SM90_TENSOR_VIEW_H_
