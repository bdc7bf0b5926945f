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

bool Arguments::Expect(Py_ssize_t count) const {
  if (count_ == count) return true;
  PyErr_Format(PyExc_TypeError, "%s: expected %zd positional arguments, got %zd", op_, count,
               count_);
  return false;
}

bool Arguments::NextTensor(const char* name, PythonTensor* tensor) {
  return tensor->Read(values_[next_++], op_, name);
}

bool Arguments::NextBool(const char* name, bool* value) {
  PyObject* object = values_[next_++];
  if (!PyBool_Check(object)) {
    PyErr_Format(PyExc_TypeError, "%s: `%s` must be a bool, got %s", op_, name,
                 Py_TYPE(object)->tp_name);
    return false;
  }
  *value = object == Py_True;
  return true;
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
