// SPDX-License-Identifier: Apache-2.0
// Outputs and workspaces, as torch's own tensors: what torch.empty does, in less host time.
#ifndef PYTHON_BINDINGS_ALLOCATE_H_
#define PYTHON_BINDINGS_ALLOCATE_H_

#include <Python.h>

namespace tiercel::python {

PyMethodDef* AllocateFunctions();

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_ALLOCATE_H_
