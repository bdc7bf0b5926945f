// SPDX-License-Identifier: Apache-2.0
// One function a kernel family; each adds the family's functions to the module.
#ifndef PYTHON_BINDINGS_FAMILIES_H_
#define PYTHON_BINDINGS_FAMILIES_H_

#include <pybind11/pybind11.h>

namespace tiercel::python {

void AddActivation(pybind11::module_& module);
void AddAttention(pybind11::module_& module);
void AddAttentionBackward(pybind11::module_& module);
void AddAttentionFp8(pybind11::module_& module);
void AddDecode(pybind11::module_& module);
void AddGemv(pybind11::module_& module);
void AddLinear(pybind11::module_& module);
void AddMoe(pybind11::module_& module);
void AddNorm(pybind11::module_& module);
void AddQuant(pybind11::module_& module);
void AddReduce(pybind11::module_& module);
void AddRotary(pybind11::module_& module);
void AddRouting(pybind11::module_& module);
void AddSoftmax(pybind11::module_& module);
void AddTranspose(pybind11::module_& module);

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_FAMILIES_H_
