// SPDX-License-Identifier: Apache-2.0
// Decides in a third of a microsecond whether a call may skip torch's dispatcher.
#ifndef PYTHON_BINDINGS_EAGER_H_
#define PYTHON_BINDINGS_EAGER_H_

#include <Python.h>

#include "python/bindings/tensor_from_python.h"

namespace tiercel::python {

// The ways to run an operator; tiercel.core.eager has the same values.
enum class Route : long {
  kDispatch = 0,     // a mode, a tracer or a tensor subclass wants to see the call
  kDirect = 1,       // plain tensors, nothing watching, no gradient wanted
  kGrad = 2,         // the same, but a gradient is wanted
  kTransformed = 3,  // inside a functorch transform or forward-mode AD
};

// Whether all are exactly torch.Tensor or Parameter.
bool ArePlainTensors(PyObject* const* tensors, Py_ssize_t count);

// How to run an operator on these tensors, which `read` then has where they are plain and can be
// read. False with a Python exception. Wants the GIL.
bool FindRoute(PyObject* const* tensors, Py_ssize_t count, TensorsOfCall* read, Route* route);

// Tells if torch's profiler runs, which sees what goes through the dispatcher: 1 for yes, 0 for no,
// -1 with a Python exception.
int IsProfiled();

// The index of a plain tensor's device, as Python's int; -1 on the CPU.
PyObject* DeviceOf(PyObject* tensor);

// A plain tensor's dtype, as torch's object. A new reference, or null with a Python exception.
PyObject* DTypeObjectOf(PyObject* tensor);

PyMethodDef* EagerFunctions();

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_EAGER_H_
