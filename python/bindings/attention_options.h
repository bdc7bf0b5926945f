// SPDX-License-Identifier: Apache-2.0
// Readers of the options of attention's public functions, for calls with `options` like
// AttentionOptions.
#ifndef PYTHON_BINDINGS_ATTENTION_OPTIONS_H_
#define PYTHON_BINDINGS_ATTENTION_OPTIONS_H_

#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/sm90/tensor_view.h"
#include "python/bindings/arguments.h"
#include "python/bindings/reference.h"

namespace tiercel::python {

template <typename Call>
bool ReadCausal(PyObject* object, const char* op, const char* name, Call* call) {
  bool causal = false;
  if (!ReadValue(object, op, name, &causal)) return false;
  call->options.right = causal ? 0 : -1;
  return true;
}

// None or (left, right); a causal call, of which `right` is 0 already, keeps that.
template <typename Call>
bool ReadWindow(PyObject* object, const char* op, const char* name, Call* call) {
  if (object == Py_None) return true;
  const bool sequence = PySequence_Check(object) != 0;
  const Reference limits(sequence ? PySequence_Tuple(object) : nullptr);
  if (sequence && !limits) return false;
  if (!sequence || PyTuple_Size(limits.get()) != 2) {
    PyErr_Format(sequence ? PyExc_ValueError : PyExc_TypeError,
                 "%s: `window` must be None or (left, right)", op);
    return false;
  }
  int64_t right = 0;
  if (!ReadValue(PyTuple_GetItem(limits.get(), 0), op, name, &call->options.left) ||
      !ReadValue(PyTuple_GetItem(limits.get(), 1), op, name, &right)) {
    return false;
  }
  if (call->options.right != 0) call->options.right = right;
  return true;
}

// None stands for the square root of 1 / D, of the queries that `kQueries` finds.
template <auto kQueries, typename Call>
bool ReadScale(PyObject* object, const char* op, const char* name, Call* call) {
  if (object != Py_None) return ReadValue(object, op, name, &call->options.scale);
  const TensorView& q = *kQueries(*call);
  const int64_t d = q.ndim > 0 ? q.shape[q.ndim - 1] : 1;
  call->options.scale = 1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(d, 1)));
  return true;
}

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_ATTENTION_OPTIONS_H_
