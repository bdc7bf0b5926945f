// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/eager_outputs.h"

#include "python/bindings/allocate.h"

namespace tiercel::python {
namespace {

// The functions below return null without a Python exception where the call is not the
// plain case.

PyObject* SizesOf(const Output& output, const Arguments& arguments) {
  int64_t values[kMaxOutputDims];
  bool fits = true;
  const Py_ssize_t count = EachSize(output, arguments, [&](Py_ssize_t i, int64_t value) {
    fits = fits && i < kMaxOutputDims;
    if (fits) values[i] = value;
  });
  if (count < 0 || !fits) return nullptr;
  Reference sizes(PyTuple_New(count));
  for (Py_ssize_t i = 0; sizes && i < count; ++i) {
    PyObject* size = PyLong_FromLongLong(values[i]);
    if (size == nullptr) return nullptr;
    PyTuple_SET_ITEM(sizes.get(), i, size);
  }
  return sizes.Release();
}

PyObject* DTypeOf(const Output& output, const Arguments& arguments) {
  if (output.other_dtype != nullptr && arguments.IsGiven(output.other_place)) {
    return Py_NewRef(output.other_dtype);
  }
  if (output.dtype != nullptr) return Py_NewRef(output.dtype);
  PyObject* argument = arguments[output.dtype_place];
  return arguments.view(output.dtype_place) ? DTypeObjectOf(argument) : Py_NewRef(argument);
}

PyObject* MakeOutput(const Output& output, const Arguments& arguments) {
  const TensorView* like = arguments.view(output.like);
  if (like == nullptr) return nullptr;
  const Reference sizes(SizesOf(output, arguments));
  if (!sizes) return nullptr;
  const Reference dtype(DTypeOf(output, arguments));
  if (!dtype) return nullptr;
  const bool unwanted = dtype.get() == output.unwanted;  // dtypes are singletons
  return NewTensor(arguments[output.like], sizes.get(), unwanted ? output.instead : dtype.get());
}

}  // namespace

bool Arguments::ReadInt(Py_ssize_t place, long long* number) const {
  if (!PyLong_CheckExact(values_[place])) return false;
  *number = PyLong_AsLongLong(values_[place]);
  if (*number == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  return true;
}

bool MakeOutputs(const EagerCall& call, const Arguments& arguments, Outputs* outputs) {
  for (Py_ssize_t i = 0; i < call.outputs.count; ++i) {
    (*outputs)[i].Take(MakeOutput(call.outputs.items[i], arguments));
    if (!(*outputs)[i]) return false;
  }
  return true;
}

}  // namespace tiercel::python
