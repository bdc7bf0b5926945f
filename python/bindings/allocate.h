// SPDX-License-Identifier: Apache-2.0
// Outputs and workspaces, as torch's own tensors: what torch.empty does, in less host time.
#ifndef PYTHON_BINDINGS_ALLOCATE_H_
#define PYTHON_BINDINGS_ALLOCATE_H_

#include <Python.h>

namespace tiercel::python {

// A new contiguous tensor of torch's on the device of `like`, or null with a Python exception;
// `sizes` is exactly a tuple.
PyObject* NewTensor(PyObject* like, PyObject* sizes, PyObject* dtype);

PyMethodDef* AllocateFunctions();

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_ALLOCATE_H_
