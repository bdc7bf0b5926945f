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

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_TENSOR_FROM_PYTHON_H_
