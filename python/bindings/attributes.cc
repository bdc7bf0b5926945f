// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/attributes.h"

#include <cstring>

#include "python/bindings/reference.h"

namespace tiercel::python {
namespace {

// Interned once: a lookup by a fresh string costs more than the lookup.
struct Names {
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* stride = PyUnicode_InternFromString("stride");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* device = PyUnicode_InternFromString("device");
  PyObject* type = PyUnicode_InternFromString("type");
  PyObject* index = PyUnicode_InternFromString("index");
};

const Names& names() {
  static const Names* instance = new Names;  // never destroyed: Python may be gone by then
  return *instance;
}

bool ReadSizes(PyObject* sizes, int max_dims, int64_t* out, int32_t* count) {
  if (!PyTuple_Check(sizes)) {
    PyErr_Format(PyExc_TypeError, "expected a tuple of sizes, got %s", Py_TYPE(sizes)->tp_name);
    return false;
  }
  const Py_ssize_t n = PyTuple_GET_SIZE(sizes);
  if (n > max_dims) {
    PyErr_Format(PyExc_ValueError, "it has %zd dimensions", n);
    return false;
  }
  for (Py_ssize_t i = 0; i < n; ++i) {
    out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, i));
    if (out[i] == -1 && PyErr_Occurred()) return false;
  }
  *count = static_cast<int32_t>(n);
  return true;
}

DType ParseDType(const char* text) {
  static constexpr struct {
    const char* name;
    DType dtype;
  } kTable[] = {
      {"torch.float32", DType::kFloat32},
      {"torch.float16", DType::kFloat16},
      {"torch.bfloat16", DType::kBFloat16},
      {"torch.int32", DType::kInt32},
      {"torch.int64", DType::kInt64},
      {"torch.int16", DType::kInt16},
      {"torch.int8", DType::kInt8},
      {"torch.uint8", DType::kUInt8},
      {"torch.bool", DType::kBool},
      {"torch.float64", DType::kFloat64},
      {"torch.float8_e4m3fn", DType::kFloat8E4M3},
      {"torch.float8_e5m2", DType::kFloat8E5M2},
      {"torch.float4_e2m1fn_x2", DType::kFloat4E2M1x2},
  };
  for (const auto& entry : kTable) {
    if (std::strcmp(text, entry.name) == 0) return entry.dtype;
  }
  return DType::kUnknown;
}

}  // namespace

bool LooksLikeTensor(PyObject* object) {
  return PyObject_HasAttr(object, names().data_ptr) && PyObject_HasAttr(object, names().stride) &&
         PyObject_HasAttr(object, names().device);
}

bool ReadShape(PyObject* tensor, int max_dims, int64_t* shape, int64_t* strides, int32_t* ndim) {
  const Reference sizes(PyObject_GetAttr(tensor, names().shape));
  if (!sizes || !ReadSizes(sizes.get(), max_dims, shape, ndim)) return false;
  const Reference steps(PyObject_CallMethodNoArgs(tensor, names().stride));
  int32_t count = 0;
  if (!steps || !ReadSizes(steps.get(), max_dims, strides, &count)) return false;
  if (count == *ndim) return true;
  PyErr_SetString(PyExc_ValueError, "its shape and strides disagree");
  return false;
}

bool ReadDType(PyObject* tensor, DType* dtype) {
  // torch's dtypes are singletons that live as long as torch, so the last few are known by address.
  static constexpr int kEntries = 8;
  static struct {
    PyObject* object;
    DType dtype;
  } cache[kEntries];
  static int next = 0;

  const Reference object(PyObject_GetAttr(tensor, names().dtype));
  if (!object) return false;
  for (const auto& entry : cache) {
    if (entry.object == object.get()) {
      *dtype = entry.dtype;
      return true;
    }
  }
  const Reference text(PyObject_Str(object.get()));
  const char* utf8 = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  if (utf8 == nullptr) return false;
  *dtype = ParseDType(utf8);
  PyObject* evicted = cache[next].object;
  Py_INCREF(object.get());
  cache[next] = {object.get(), *dtype};
  next = (next + 1) % kEntries;
  Py_XDECREF(evicted);
  return true;
}

bool ReadDevice(PyObject* tensor, DeviceType* type, int32_t* index) {
  const Reference device(PyObject_GetAttr(tensor, names().device));
  if (!device) return false;
  const Reference kind(PyObject_GetAttr(device.get(), names().type));
  const char* text = kind ? PyUnicode_AsUTF8(kind.get()) : nullptr;
  if (text == nullptr) return false;
  *type = std::strcmp(text, "cuda") == 0  ? DeviceType::kCUDA
          : std::strcmp(text, "cpu") == 0 ? DeviceType::kCPU
                                          : DeviceType::kOther;
  const Reference number(PyObject_GetAttr(device.get(), names().index));
  if (!number) return false;
  *index = 0;
  if (number.get() == Py_None) return true;
  const long value = PyLong_AsLong(number.get());
  if (value == -1 && PyErr_Occurred()) return false;
  *index = static_cast<int32_t>(value);
  return true;
}

bool ReadPointer(PyObject* tensor, void** data) {
  const Reference address(PyObject_CallMethodNoArgs(tensor, names().data_ptr));
  if (!address) return false;
  *data = PyLong_AsVoidPtr(address.get());
  return *data != nullptr || !PyErr_Occurred();
}

bool TorchRawStream(int32_t device_index, void** stream) {
  static PyObject* getter = nullptr;
  if (getter == nullptr) {
    const Reference torch(PyImport_ImportModule("torch._C"));
    if (!torch) return false;
    getter = PyObject_GetAttrString(torch.get(), "_cuda_getCurrentRawStream");
    if (getter == nullptr) {
      PyErr_SetString(PyExc_RuntimeError,
                      "this PyTorch is built without CUDA, so it has no stream to launch on");
      return false;
    }
  }
  const Reference index(PyLong_FromLong(device_index));
  const Reference value(index ? PyObject_CallOneArg(getter, index.get()) : nullptr);
  if (!value) return false;
  *stream = PyLong_AsVoidPtr(value.get());
  return *stream != nullptr || !PyErr_Occurred();
}

}  // namespace tiercel::python
