// SPDX-License-Identifier: Apache-2.0
#ifndef PYTHON_BINDINGS_JIT_H_
#define PYTHON_BINDINGS_JIT_H_

#include <pybind11/pybind11.h>

namespace tiercel::python {

// Adds the type JitKernel, a kernel that was compiled on this machine.
void AddJit(pybind11::module_& module);

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_JIT_H_
