// SPDX-License-Identifier: Apache-2.0
// Reads a Python tensor's pointer, dtype, shape, strides and device in place, without torch's
// headers.
#ifndef PYTHON_BINDINGS_TENSOR_FROM_PYTHON_H_
#define PYTHON_BINDINGS_TENSOR_FROM_PYTHON_H_

#include <Python.h>

#include <cstdint>

#include "kernels/sm90/tensor_view.h"

namespace tiercel::python {

// A tensor argument while a call runs; the caller's reference keeps the memory alive.
class PythonTensor {
 public:
  PythonTensor() = default;
  PythonTensor(const PythonTensor&) = delete;  // `view` may point into `storage_`
  PythonTensor& operator=(const PythonTensor&) = delete;

  // False with a Python exception that names `op` and the argument. A fake tensor passes with a
  // null pointer: launchers check that, after the device.
  bool Read(PyObject* object, const char* op, const char* name);

  // The stream that the tensor's framework works on now. False with a Python exception.
  bool CurrentStream(void** stream) const;

  const TensorView& view() const { return view_; }

 private:
  static constexpr int kMaxDims = 16;

  bool ReadExchanged(PyObject* object, const char* op, const char* name);
  bool ReadAttributes(PyObject* object);

  TensorView view_{};
  const void* api_ = nullptr;  // the dlpack::ExchangeApi that described it, if any
  int64_t storage_[2 * kMaxDims];
};

// The tensors of one call, each read once. PythonTensor::Read takes from here what this thread has
// in use, so nothing may change the tensors meanwhile.
class TensorsOfCall {
 public:
  TensorsOfCall() = default;
  TensorsOfCall(const TensorsOfCall&) = delete;
  TensorsOfCall& operator=(const TensorsOfCall&) = delete;
  ~TensorsOfCall();

  // False, without a Python exception, where one cannot be read or there are too many.
  bool Read(PyObject* const* objects, Py_ssize_t count);

  // Null where they have not been read.
  const TensorView* view(Py_ssize_t i) const { return i < count_ ? &tensors_[i].view() : nullptr; }

  // From here on PythonTensor::Read finds them.
  void Use();

  // Null where it is none of them.
  const PythonTensor* Find(PyObject* object) const;

 private:
  static constexpr Py_ssize_t kMost = 16;  // as many as an EagerCall has

  Py_ssize_t count_ = 0;
  PyObject* const* objects_ = nullptr;
  PythonTensor tensors_[kMost];
  bool used_ = false;
  const TensorsOfCall* before_ = nullptr;  // what this thread used before
};

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_TENSOR_FROM_PYTHON_H_
