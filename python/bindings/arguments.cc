// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/arguments.h"

namespace tiercel::python {
namespace {

bool WrongType(PyObject* object, const char* op, const char* name, const char* wanted) {
  PyErr_Format(PyExc_TypeError, "%s: `%s` must be %s, got %s", op, name, wanted, ClassName(object));
  return false;
}

}  // namespace

const char* ClassName(PyObject* object) { return Py_TYPE(object)->tp_name; }

bool ReadValue(PyObject* object, const char* op, const char* name, bool* value) {
  if (!PyBool_Check(object)) return WrongType(object, op, name, "a bool");
  *value = object == Py_True;
  return true;
}

bool ReadValue(PyObject* object, const char* op, const char* name, int64_t* value) {
  if (!PyIndex_Check(object)) return WrongType(object, op, name, "an int");
  *value = PyLong_AsLongLong(object);
  return *value != -1 || PyErr_Occurred() == nullptr;
}

bool ReadValue(PyObject* object, const char* op, const char* name, double* value) {
  *value = PyFloat_AsDouble(object);
  if (*value != -1.0 || PyErr_Occurred() == nullptr) return true;
  if (!PyErr_ExceptionMatches(PyExc_TypeError)) return false;
  PyErr_Clear();
  return WrongType(object, op, name, "a float");
}

bool ReadValue(PyObject* object, const char* op, const char* name, float* value) {
  double number = 0.0;
  if (!ReadValue(object, op, name, &number)) return false;
  *value = static_cast<float>(number);
  return true;
}

bool ReadIndex(PyObject* object, const char* op, const char* name, int last, int* index) {
  int64_t number = 0;
  if (!ReadValue(object, op, name, &number)) return false;
  *index = static_cast<int>(number);
  if (number >= 0 && number <= last) return true;
  PyErr_Format(PyExc_ValueError, "%s: no %s has the index %lld", op, name,
               static_cast<long long>(number));
  return false;
}

bool ExpectCount(const char* op, Py_ssize_t expected, Py_ssize_t count) {
  if (count == expected) return true;
  PyErr_Format(PyExc_TypeError, "%s: expected %zd positional arguments, got %zd", op, expected,
               count);
  return false;
}

}  // namespace tiercel::python
