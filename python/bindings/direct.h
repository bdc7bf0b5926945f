// SPDX-License-Identifier: Apache-2.0
#ifndef PYTHON_BINDINGS_DIRECT_H_
#define PYTHON_BINDINGS_DIRECT_H_

#include <Python.h>

namespace tiercel::python {

// Adds the type Direct, an operator's eager call.
// A new reference to the type, or null with a Python exception.
PyObject* MakeDirectType();

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_DIRECT_H_
