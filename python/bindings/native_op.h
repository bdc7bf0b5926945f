// SPDX-License-Identifier: Apache-2.0
#ifndef PYTHON_BINDINGS_NATIVE_OP_H_
#define PYTHON_BINDINGS_NATIVE_OP_H_

#include <Python.h>

namespace tiercel::python {

// register_native, which gives torch's dispatcher an operator without Python, and its settings.
PyMethodDef* NativeOpFunctions();

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_NATIVE_OP_H_
