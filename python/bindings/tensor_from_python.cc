// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/tensor_from_python.h"

#include <algorithm>
#include <string>

#include "python/bindings/attributes.h"
#include "python/bindings/dlpack.h"
#include "python/bindings/exchange_cache.h"

namespace tiercel::python {
namespace {

DType DTypeOf(dlpack::DataType type) {
  if (type.code == dlpack::kFloat4E2M1FN && type.bits == 4 && type.lanes == 2) {
    return DType::kFloat4E2M1x2;
  }
  if (type.lanes != 1) return DType::kUnknown;
  switch (type.code) {
    case dlpack::kFloat:
      return type.bits == 32   ? DType::kFloat32
             : type.bits == 16 ? DType::kFloat16
             : type.bits == 64 ? DType::kFloat64
                               : DType::kUnknown;
    case dlpack::kBfloat:
      return type.bits == 16 ? DType::kBFloat16 : DType::kUnknown;
    case dlpack::kInt:
      return type.bits == 32   ? DType::kInt32
             : type.bits == 64 ? DType::kInt64
             : type.bits == 16 ? DType::kInt16
             : type.bits == 8  ? DType::kInt8
                               : DType::kUnknown;
    case dlpack::kUInt:
      return type.bits == 8 ? DType::kUInt8 : DType::kUnknown;
    case dlpack::kBool:
      return type.bits == 8 ? DType::kBool : DType::kUnknown;
    case dlpack::kFloat8E4M3FN:
      return type.bits == 8 ? DType::kFloat8E4M3 : DType::kUnknown;
    case dlpack::kFloat8E5M2:
      return type.bits == 8 ? DType::kFloat8E5M2 : DType::kUnknown;
    default:
      return DType::kUnknown;
  }
}

DeviceType DeviceTypeOf(int32_t code) {
  if (code == dlpack::kCuda) return DeviceType::kCUDA;
  if (code == dlpack::kCpu || code == dlpack::kCudaHost) return DeviceType::kCPU;
  return DeviceType::kOther;
}

// Replaces the pending exception by one that names the argument and keeps the first line of what
// was said (torch puts a stack trace below it).
void NameArgument(const char* op, const char* name) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  PyObject* text = value != nullptr ? PyObject_Str(value) : nullptr;
  const char* said = text != nullptr ? PyUnicode_AsUTF8(text) : nullptr;
  std::string line(said != nullptr ? said : "");
  line.resize(std::min(line.size(), line.find('\n')));
  PyErr_Format(PyExc_ValueError, "%s: `%s` cannot be read as a tensor in memory: %s", op, name,
               line.c_str());
  Py_XDECREF(text);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
}

thread_local const TensorsOfCall* in_use = nullptr;

}  // namespace

TensorsOfCall::~TensorsOfCall() {
  if (used_) in_use = before_;
}

bool TensorsOfCall::Read(PyObject* const* objects, Py_ssize_t count) {
  if (count > kMost) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (tensors_[i].Read(objects[i], "", "")) continue;
    PyErr_Clear();
    return false;
  }
  objects_ = objects;
  count_ = count;
  return true;
}

void TensorsOfCall::Use() {
  before_ = in_use;
  in_use = this;
  used_ = true;
}

const PythonTensor* TensorsOfCall::Find(PyObject* object) const {
  for (Py_ssize_t i = 0; i < count_; ++i) {
    if (objects_[i] == object) return &tensors_[i];
  }
  return nullptr;
}

bool PythonTensor::Read(PyObject* object, const char* op, const char* name) {
  if (const PythonTensor* known = in_use != nullptr ? in_use->Find(object) : nullptr) {
    view_ = known->view_;  // its shape outlives this
    api_ = known->api_;
    return true;
  }
  const dlpack::ExchangeApi* api = nullptr;
  if (!FindExchangeApi(Py_TYPE(object), &api)) return false;
  if (api != nullptr) {
    api_ = api;
    return ReadExchanged(object, op, name);
  }
  if (!LooksLikeTensor(object)) {
    PyErr_Format(PyExc_TypeError, "%s: `%s` must be a torch.Tensor, got %s", op, name,
                 Py_TYPE(object)->tp_name);
    return false;
  }
  if (ReadAttributes(object)) return true;
  NameArgument(op, name);
  return false;
}

bool PythonTensor::ReadExchanged(PyObject* object, const char* op, const char* name) {
  dlpack::Tensor tensor;
  const auto* api = static_cast<const dlpack::ExchangeApi*>(api_);
  if (api->tensor_from_object(object, &tensor) != 0) {
    NameArgument(op, name);
    return false;
  }
  view_.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  view_.dtype = DTypeOf(tensor.dtype);
  view_.device_type = DeviceTypeOf(tensor.device.type);
  view_.device_index = tensor.device.index;
  view_.ndim = tensor.ndim;
  view_.shape = tensor.ndim > 0 ? tensor.shape : storage_;
  view_.strides = tensor.ndim > 0 ? tensor.strides : storage_;
  if (view_.strides != nullptr) return true;
  // An older producer's way to say "contiguous".
  if (tensor.ndim > kMaxDims) {
    PyErr_Format(PyExc_ValueError, "%s: `%s` has %d dimensions", op, name, int{tensor.ndim});
    return false;
  }
  int64_t stride = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    storage_[i] = stride;
    stride *= tensor.shape[i];
  }
  view_.strides = storage_;
  return true;
}

bool PythonTensor::ReadAttributes(PyObject* object) {
  int64_t* shape = storage_;
  int64_t* strides = storage_ + kMaxDims;
  view_.shape = shape;
  view_.strides = strides;
  return ReadShape(object, kMaxDims, shape, strides, &view_.ndim) &&
         ReadDType(object, &view_.dtype) &&
         ReadDevice(object, &view_.device_type, &view_.device_index) &&
         ReadPointer(object, &view_.data);
}

bool PythonTensor::CurrentStream(void** stream) const {
  *stream = nullptr;
  // Without memory there is no launch: the launcher says what is wrong, or has nothing to do.
  if (view_.device_type != DeviceType::kCUDA || view_.data == nullptr) return true;
  if (api_ != nullptr) {
    const auto* api = static_cast<const dlpack::ExchangeApi*>(api_);
    return api->current_work_stream(dlpack::kCuda, view_.device_index, stream) == 0;
  }
  return TorchRawStream(view_.device_index, stream);
}

}  // namespace tiercel::python
