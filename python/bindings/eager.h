// SPDX-License-Identifier: Apache-2.0
// Decides in a third of a microsecond whether a call may skip torch's dispatcher.
#ifndef PYTHON_BINDINGS_EAGER_H_
#define PYTHON_BINDINGS_EAGER_H_

#include <pybind11/pybind11.h>

namespace tiercel::python {

// The ways to run an operator; tiercel._eager has the same values.
enum class Route : long {
  kDispatch = 0,     // a mode, a tracer or a tensor subclass wants to see the call
  kDirect = 1,       // plain tensors, nothing watching, no gradient wanted
  kGrad = 2,         // the same, but a gradient is wanted
  kTransformed = 3,  // inside a functorch transform or forward-mode AD
};

void AddEager(pybind11::module_& module);

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_EAGER_H_
