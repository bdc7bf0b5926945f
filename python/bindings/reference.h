// SPDX-License-Identifier: Apache-2.0
// An owned reference to a Python object.
#ifndef PYTHON_BINDINGS_REFERENCE_H_
#define PYTHON_BINDINGS_REFERENCE_H_

#include <Python.h>

#include <utility>

namespace tiercel::python {

class Reference {
 public:
  Reference() = default;
  // Takes the reference over; null, as a failing function returns it, stays null.
  explicit Reference(PyObject* object) : object_(object) {}
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() { Py_XDECREF(object_); }

  void Take(PyObject* object) { Py_XDECREF(std::exchange(object_, object)); }
  PyObject* get() const { return object_; }
  PyObject* Release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_REFERENCE_H_
