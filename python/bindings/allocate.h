// SPDX-License-Identifier: Apache-2.0
// Outputs and workspaces, as torch's own tensors: what torch.empty does, in less host time.
#ifndef PYTHON_BINDINGS_ALLOCATE_H_
#define PYTHON_BINDINGS_ALLOCATE_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>

namespace tiercel::python {

// A new contiguous tensor on the device of `like`, of its dtype or of float32. Null with a Python
// exception.
PyObject* NewTensor(PyObject* like, std::initializer_list<int64_t> sizes);
PyObject* NewFloat32(PyObject* like, std::initializer_list<int64_t> sizes);

void AddAllocate(pybind11::module_& module);

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_ALLOCATE_H_
