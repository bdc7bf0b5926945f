// SPDX-License-Identifier: Apache-2.0
// Outputs and workspaces, as torch's own tensors: what torch.empty does, in less host time.
#ifndef PYTHON_BINDINGS_ALLOCATE_H_
#define PYTHON_BINDINGS_ALLOCATE_H_

#include <Python.h>

#include <cstdint>
#include <initializer_list>

namespace tiercel::python {

// A new contiguous tensor of torch's on the device of `like`, or null with a Python exception;
// `sizes` is exactly a tuple.
PyObject* NewTensor(PyObject* like, PyObject* sizes, PyObject* dtype);

// The same of the dtype of `like`, or of float32.
PyObject* NewTensor(PyObject* like, std::initializer_list<int64_t> sizes);
PyObject* NewFloat32(PyObject* like, std::initializer_list<int64_t> sizes);

PyMethodDef* AllocateFunctions();

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_ALLOCATE_H_
