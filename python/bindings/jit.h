// SPDX-License-Identifier: Apache-2.0
#ifndef PYTHON_BINDINGS_JIT_H_
#define PYTHON_BINDINGS_JIT_H_

#include <Python.h>

namespace tiercel::python {

// The type JitKernel, a kernel that was compiled on this machine; null with an exception set.
PyObject* MakeJitKernelType();

PyMethodDef* JitFunctions();

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_JIT_H_
