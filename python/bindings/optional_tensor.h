// SPDX-License-Identifier: Apache-2.0
// A tensor argument that may be None.
#ifndef PYTHON_BINDINGS_OPTIONAL_TENSOR_H_
#define PYTHON_BINDINGS_OPTIONAL_TENSOR_H_

#include "python/bindings/tensor_from_python.h"

namespace tiercel::python {

class OptionalTensor {
 public:
  // As PythonTensor::Read; None leaves `view` null.
  bool Read(PyObject* object, const char* op, const char* name) {
    if (object == Py_None) return true;
    if (!tensor_.Read(object, op, name)) return false;
    view_ = &tensor_.view();
    return true;
  }

  const TensorView* view() const { return view_; }

 private:
  PythonTensor tensor_;
  const TensorView* view_ = nullptr;
};

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_OPTIONAL_TENSOR_H_
