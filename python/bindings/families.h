// SPDX-License-Identifier: Apache-2.0
// One function a kernel family: the functions that it adds to the module, as a table that ends with
// zeros.
#ifndef PYTHON_BINDINGS_FAMILIES_H_
#define PYTHON_BINDINGS_FAMILIES_H_

#include <Python.h>

namespace tiercel::python {

PyMethodDef* ActivationFunctions();
PyMethodDef* AttentionFunctions();
PyMethodDef* AttentionBackwardFunctions();
PyMethodDef* AttentionFp8Functions();
PyMethodDef* DecodeFunctions();
PyMethodDef* GemvFunctions();
PyMethodDef* GroupedGemmFunctions();
PyMethodDef* LinearFunctions();
PyMethodDef* MoeFunctions();
PyMethodDef* NormFunctions();
PyMethodDef* QuantFunctions();
PyMethodDef* ReduceFunctions();
PyMethodDef* RotaryFunctions();
PyMethodDef* RoutingFunctions();
PyMethodDef* SoftmaxFunctions();
PyMethodDef* TransposeFunctions();
PyMethodDef* TunedFunctions();

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_FAMILIES_H_
