// SPDX-License-Identifier: Apache-2.0
// The arguments of one eager call, and what follows from their tensors: if the call takes them as
// they lie in memory, and its outputs.
#ifndef PYTHON_BINDINGS_EAGER_OUTPUTS_H_
#define PYTHON_BINDINGS_EAGER_OUTPUTS_H_

#include <Python.h>

#include <array>

#include "python/bindings/eager.h"
#include "python/bindings/eager_call.h"
#include "python/bindings/reference.h"
#include "python/bindings/tensor_from_python.h"

namespace tiercel::python {

// One call's arguments. Its tensors that are not None are read once.
class Arguments {
 public:
  Arguments(const EagerCall& call, PyObject* const* values) : values_(values) {
    places_.fill(-1);
    const Py_ssize_t first = call.layout.tensors.items[0];
    for (const Py_ssize_t place : call.layout.tensors) {
      if (!IsGiven(place) && place != first) continue;
      places_[place] = static_cast<signed char>(count_);
      tensors_[count_++] = values[place];
    }
  }

  bool FindRoute(Route* route) { return python::FindRoute(tensors_.data(), count_, &read_, route); }

  PyObject* operator[](Py_ssize_t place) const { return values_[place]; }
  bool IsGiven(Py_ssize_t place) const { return values_[place] != Py_None; }

  // Null where argument `place` is None, no tensor argument, or could not be read.
  const TensorView* view(Py_ssize_t place) const {
    return places_[place] < 0 ? nullptr : read_.view(places_[place]);
  }

  // False without a Python exception where it is not an int.
  bool ReadInt(Py_ssize_t place, long long* number) const;

  // The native function finds the tensors from here on.
  void Use() { read_.Use(); }

 private:
  PyObject* const* values_;
  Py_ssize_t count_ = 0;
  std::array<PyObject*, kMaxTensors> tensors_;
  std::array<signed char, kMaxArguments> places_;
  TensorsOfCall read_;
};

using Outputs = std::array<Reference, kMaxOutputs>;

// Allocates the outputs. False with a Python exception, or without one where the call is not the
// plain case.
bool MakeOutputs(const EagerCall& call, const Arguments& arguments, Outputs* outputs);

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_EAGER_OUTPUTS_H_
