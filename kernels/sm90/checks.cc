// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/checks.h"

#include <algorithm>

namespace tiercel {
namespace {

std::string device_text(const TensorView& view) {
  switch (view.device_type) {
    case DeviceType::kCPU:
      return "a CPU tensor";
    case DeviceType::kCUDA:
      return "a tensor on cuda:" + std::to_string(view.device_index);
    case DeviceType::kOther:
      break;
  }
  return "a tensor on another kind of device";
}

bool is_empty(const TensorView& view) {
  return std::find(view.shape, view.shape + view.ndim, 0) != view.shape + view.ndim;
}

}  // namespace

std::string mismatch(const Argument& argument, const std::string& expected,
                     const std::string& got) {
  return std::string(argument.op) + ": `" + argument.name + "` must " + expected + ", got " + got;
}

std::string shape_text(const int64_t* shape, int ndim) {
  std::string text = "[";
  for (int i = 0; i < ndim; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

Status check_dtype(const Argument& argument, std::initializer_list<DType> allowed) {
  if (std::find(allowed.begin(), allowed.end(), argument.view.dtype) != allowed.end()) {
    return Status();
  }
  std::string names;
  for (auto it = allowed.begin(); it != allowed.end(); ++it) {
    if (it != allowed.begin()) names += it + 1 == allowed.end() ? " or " : ", ";
    names += dtype_name(*it);
  }
  return Status::TypeError(
      mismatch(argument, "have dtype " + names, dtype_name(argument.view.dtype)));
}

Status check_rank(const Argument& argument, int rank) {
  if (argument.view.ndim == rank) return Status();
  return Status::InvalidArgument(mismatch(argument, "have " + std::to_string(rank) + " dimensions",
                                          std::to_string(argument.view.ndim) + " (shape " +
                                              shape_text(argument.view.shape, argument.view.ndim) +
                                              ")"));
}

Status check_shape(const Argument& argument, std::initializer_list<int64_t> shape,
                   const char* why) {
  const TensorView& view = argument.view;
  if (view.ndim == static_cast<int>(shape.size()) &&
      std::equal(shape.begin(), shape.end(), view.shape)) {
    return Status();
  }
  return Status::InvalidArgument(mismatch(
      argument, std::string("have shape ") + why + " = " + shape_text(shape.begin(), shape.size()),
      shape_text(view.shape, view.ndim)));
}

Status check_contiguous(const Argument& argument) {
  const TensorView& view = argument.view;
  if (is_empty(view)) return Status();
  int64_t stride = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    if (view.shape[i] != 1 && view.strides[i] != stride) {
      return Status::InvalidArgument(mismatch(argument, "be contiguous",
                                              "strides " + shape_text(view.strides, view.ndim) +
                                                  " for shape " +
                                                  shape_text(view.shape, view.ndim)));
    }
    stride *= view.shape[i];
  }
  return Status();
}

Status check_cuda(const Argument& argument) {
  if (argument.view.device_type != DeviceType::kCUDA) {
    return Status::InvalidArgument(
        mismatch(argument, "be a CUDA tensor", device_text(argument.view)));
  }
  if (argument.view.data == nullptr && !is_empty(argument.view)) {
    return Status::InvalidArgument(
        mismatch(argument, "have memory", "a tensor without storage (fake or meta)"));
  }
  return Status();
}

Status check_same_device(const Argument& argument, const Argument& reference) {
  if (argument.view.device_type == reference.view.device_type &&
      argument.view.device_index == reference.view.device_index) {
    return Status();
  }
  return Status::InvalidArgument(mismatch(
      argument,
      std::string("be on the device of `") + reference.name + "`, " + device_text(reference.view),
      device_text(argument.view)));
}

int widest_vector_bytes(const void* base, int64_t rows, int64_t row_stride, int64_t row_length,
                        DType dtype) {
  const int64_t element = dtype_bytes(dtype);
  uint64_t bits = reinterpret_cast<uintptr_t>(base) | static_cast<uint64_t>(row_length * element);
  if (rows > 1) bits |= static_cast<uint64_t>(row_stride * element);
  int width = 16;
  while (width > element && bits % width != 0) width /= 2;
  return width;
}

}  // namespace tiercel
