// SPDX-License-Identifier: Apache-2.0
// One function a kernel family; each adds the family's functions to the module.
#ifndef PYTHON_BINDINGS_FAMILIES_H_
#define PYTHON_BINDINGS_FAMILIES_H_

#include <pybind11/pybind11.h>

namespace tiercel::python {

void AddLinear(pybind11::module_& module);
void AddNorm(pybind11::module_& module);
void AddRouting(pybind11::module_& module);

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_FAMILIES_H_
