// SPDX-License-Identifier: Apache-2.0
#ifndef PYTHON_BINDINGS_LAUNCHER_H_
#define PYTHON_BINDINGS_LAUNCHER_H_

#include <Python.h>

namespace tiercel::python {

// The type tiercel._C.Launcher: an operator's outputs and launch, without Python in between. A new
// reference, or null with a Python exception.
PyObject* MakeLauncherType();

// Whether it is one.
bool IsLauncher(PyObject* object);

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_LAUNCHER_H_
