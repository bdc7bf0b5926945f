// SPDX-License-Identifier: Apache-2.0
// Python's numbers. Each function returns false with a Python exception, after which no other call
// of Python's may follow.
#ifndef PYTHON_BINDINGS_NUMBERS_H_
#define PYTHON_BINDINGS_NUMBERS_H_

#include <Python.h>

#include <cstdint>

namespace tiercel::python {

inline bool ReadInteger(PyObject* object, int64_t* value) {
  *value = PyLong_AsLongLong(object);
  return !(*value == -1 && PyErr_Occurred());
}

inline bool ReadFloat(PyObject* object, double* value) {
  *value = PyFloat_AsDouble(object);
  return !(*value == -1.0 && PyErr_Occurred());
}

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_NUMBERS_H_
