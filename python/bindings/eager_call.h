// SPDX-License-Identifier: Apache-2.0
#ifndef PYTHON_BINDINGS_EAGER_CALL_H_
#define PYTHON_BINDINGS_EAGER_CALL_H_

#include <Python.h>

namespace tiercel::python {

// The type tiercel._C.EagerCall, an operator's eager call. A new reference, or null with a Python
// exception.
PyObject* MakeEagerCallType();

// The type tiercel._C.EagerInto, an EagerCall that writes to given results; made after EagerCall.
PyObject* MakeEagerIntoType();

// The type tiercel._C.EagerFilled, an EagerCall as torch's dispatcher makes it; likewise.
PyObject* MakeEagerFilledType();

// set_overriding, which tells all calls whether a backend was asked for outside of a call.
PyMethodDef* EagerCallFunctions();

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_EAGER_CALL_H_
