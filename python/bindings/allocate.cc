// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/allocate.h"

#include "kernels/sm90/driver.h"
#include "python/bindings/arguments.h"
#include "python/bindings/call.h"
#include "python/bindings/eager.h"
#include "python/bindings/reference.h"

namespace tiercel::python {
namespace {

// Set by tiercel.core.eager once torch is imported. Never freed: Python may be gone at exit.
struct Hooks {
  PyObject* empty;           // torch.empty
  PyObject* on_current_gpu;  // (sizes, strides, dtype) -> tensor on the current GPU; may be null
  PyObject* current_gpu;     // () -> its index
  PyObject* keywords;        // ("dtype", "device")
  PyObject* name_device;     // "device"
  PyObject* name_dtype;      // "dtype"
  PyObject* float32;         // torch.float32
};
Hooks* hooks = nullptr;

PyObject* AnyDevice(PyObject* like, PyObject* sizes, PyObject* dtype) {
  PyObject* device = PyObject_GetAttr(like, hooks->name_device);
  if (device == nullptr) return nullptr;
  PyObject* const args[] = {sizes, dtype, device};
  PyObject* tensor = PyObject_Vectorcall(hooks->empty, args, 1, hooks->keywords);
  Py_DECREF(device);
  return tensor;
}

// Other numbers, such as numpy's, torch.empty converts itself.
bool ArePlainInts(PyObject* sizes) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sizes); ++i) {
    if (!PyLong_CheckExact(PyTuple_GET_ITEM(sizes, i))) return false;
  }
  return true;
}

// It is current then, without asking: a tenth of a microsecond a tensor.
bool IsTheOnlyGpu() {
  static const bool only = [] {
    int count = 0;
    return driver_status().ok() && driver_api().device_get_count(&count) == CUDA_SUCCESS &&
           count == 1;
  }();
  return only;
}

// 1 for yes, 0 for no, -1 with a Python exception.
int IsOnCurrentGpu(PyObject* tensor) {
  if (hooks->on_current_gpu == nullptr || !ArePlainTensors(&tensor, 1)) return 0;
  PyObject* device = DeviceOf(tensor);
  if (device == nullptr) return -1;
  const long index = PyLong_AsLong(device);
  Py_DECREF(device);
  if (index < 0) return PyErr_Occurred() ? -1 : 0;
  if (IsTheOnlyGpu()) return 1;
  PyObject* current = PyObject_CallNoArgs(hooks->current_gpu);
  if (current == nullptr) return -1;
  const long current_index = PyLong_AsLong(current);
  Py_DECREF(current);
  return current_index == -1 && PyErr_Occurred() ? -1 : current_index == index;
}

// A new tuple, or null with a Python exception.
PyObject* ContiguousStrides(PyObject* sizes) {
  const Py_ssize_t count = PyTuple_GET_SIZE(sizes);
  PyObject* strides = PyTuple_New(count);
  long long step = 1;
  for (Py_ssize_t i = count; strides != nullptr && i-- > 0;) {
    PyObject* stride = PyLong_FromLongLong(step);
    const long long size = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, i));
    if (stride == nullptr || (size == -1 && PyErr_Occurred())) {
      Py_XDECREF(stride);
      Py_CLEAR(strides);
      break;
    }
    PyTuple_SET_ITEM(strides, i, stride);
    step *= size > 0 ? size : 1;  // as torch's are
  }
  return strides;
}

PyObject* Empty(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || hooks == nullptr || !PyTuple_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "empty: expected (like, sizes, dtype), sizes a tuple");
    return nullptr;
  }
  return NewTensor(args[0], args[1], args[2]);
}

PyObject* SetAllocationHooks(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!ExpectCount("set_allocation_hooks", 4, count)) return nullptr;
  const bool fast = values[1] != Py_None && values[2] != Py_None;
  PyObject* keywords = Py_BuildValue("(ss)", "dtype", "device");
  PyObject* name_device = PyUnicode_InternFromString("device");
  PyObject* name_dtype = PyUnicode_InternFromString("dtype");
  if (keywords == nullptr || name_device == nullptr || name_dtype == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) Py_INCREF(values[i]);
  hooks = new Hooks{values[0],
                    fast ? values[1] : nullptr,
                    fast ? values[2] : nullptr,
                    keywords,
                    name_device,
                    name_dtype,
                    values[3]};
  Py_RETURN_NONE;
}

// A new tuple, or null with a Python exception.
PyObject* TupleOf(std::initializer_list<int64_t> sizes) {
  Reference tuple(PyTuple_New(static_cast<Py_ssize_t>(sizes.size())));
  Py_ssize_t i = 0;
  for (const int64_t size : sizes) {
    PyObject* number = tuple ? PyLong_FromLongLong(size) : nullptr;
    if (number == nullptr) return nullptr;
    PyTuple_SET_ITEM(tuple.get(), i++, number);
  }
  return tuple.Release();
}

// False with a Python exception.
bool HasHooks() {
  if (hooks == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "tiercel allocates nothing without PyTorch");
  }
  return hooks != nullptr;
}

PyMethodDef functions[] = {
    {"empty", AsMethod(Empty), METH_FASTCALL,
     "empty(like, sizes, dtype, /)\n--\n\n"
     "A new contiguous tensor of torch's on the device of `like`; `sizes` is a tuple."},
    {"set_allocation_hooks", AsMethod(SetAllocationHooks), METH_FASTCALL,
     "set_allocation_hooks(empty, on_current_gpu, current_gpu, float32, /)\n--\n\n"
     "What of torch's to call: `empty`; the next two may be None. And its float32."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyObject* NewTensor(PyObject* like, PyObject* sizes, PyObject* dtype) {
  const int fast = ArePlainInts(sizes) ? IsOnCurrentGpu(like) : 0;
  if (fast < 0) return nullptr;
  if (fast == 0) return AnyDevice(like, sizes, dtype);
  PyObject* strides = ContiguousStrides(sizes);
  if (strides == nullptr) return nullptr;
  PyObject* const values[] = {sizes, strides, dtype};
  PyObject* tensor = PyObject_Vectorcall(hooks->on_current_gpu, values, 3, nullptr);
  Py_DECREF(strides);
  return tensor;
}

PyObject* NewTensor(PyObject* like, std::initializer_list<int64_t> sizes) {
  if (!HasHooks()) return nullptr;
  const Reference tuple(TupleOf(sizes)), dtype(PyObject_GetAttr(like, hooks->name_dtype));
  return tuple && dtype ? NewTensor(like, tuple.get(), dtype.get()) : nullptr;
}

PyObject* NewFloat32(PyObject* like, std::initializer_list<int64_t> sizes) {
  if (!HasHooks()) return nullptr;
  const Reference tuple(TupleOf(sizes));
  return tuple ? NewTensor(like, tuple.get(), hooks->float32) : nullptr;
}

PyMethodDef* AllocateFunctions() { return functions; }

}  // namespace tiercel::python
