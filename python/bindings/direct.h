// SPDX-License-Identifier: Apache-2.0
#ifndef PYTHON_BINDINGS_DIRECT_H_
#define PYTHON_BINDINGS_DIRECT_H_

#include <pybind11/pybind11.h>

namespace tiercel::python {

// Adds the type Direct, an operator's eager call.
void AddDirect(pybind11::module_& module);

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_DIRECT_H_
