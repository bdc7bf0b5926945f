// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/call.h"

#include <climits>

namespace tiercel::python {

PyObject* Raise(const Status& status) {
  PyObject* type = PyExc_RuntimeError;
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
      type = PyExc_ValueError;
      break;
    case StatusCode::kTypeError:
      type = PyExc_TypeError;
      break;
    case StatusCode::kUnimplemented:
      type = PyExc_NotImplementedError;
      break;
    case StatusCode::kRuntimeError:
    case StatusCode::kOk:
      break;
  }
  PyErr_SetString(type, status.message().c_str());
  return nullptr;
}

PyObject* Load(PyObject* device, Status (*load)(int)) {
  const long index = PyLong_AsLong(device);
  if (index == -1 && PyErr_Occurred()) return nullptr;
  if (index < 0 || index > INT_MAX) {
    PyErr_Format(PyExc_ValueError, "a CUDA device's index is expected, got %ld", index);
    return nullptr;
  }
  const Status status = WithoutGil([&] { return load(static_cast<int>(index)); });
  if (!status.ok()) return Raise(status);
  Py_RETURN_NONE;
}

}  // namespace tiercel::python
