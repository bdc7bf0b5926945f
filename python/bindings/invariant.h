// SPDX-License-Identifier: Apache-2.0
#ifndef PYTHON_BINDINGS_INVARIANT_H_
#define PYTHON_BINDINGS_INVARIANT_H_

#include <Python.h>

namespace tiercel::python {

// The batch-invariant mode, for tiercel.core.invariance.
PyMethodDef* InvariantFunctions();

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_INVARIANT_H_
