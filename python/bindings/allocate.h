// SPDX-License-Identifier: Apache-2.0
// Outputs and workspaces, as torch's own tensors: what torch.empty does, in less host time.
#ifndef PYTHON_BINDINGS_ALLOCATE_H_
#define PYTHON_BINDINGS_ALLOCATE_H_

#include <pybind11/pybind11.h>

namespace tiercel::python {

void AddAllocate(pybind11::module_& module);

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_ALLOCATE_H_
