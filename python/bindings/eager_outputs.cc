// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/eager_outputs.h"

#include "python/bindings/allocate.h"

namespace tiercel::python {
namespace {

bool IsContiguous(const TensorView& view) {
  int64_t step = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    if (view.shape[i] == 0) return true;
    if (view.shape[i] != 1 && view.strides[i] != step) return false;
    step *= view.shape[i];
  }
  return true;
}

// The functions below return false or null without a Python exception where the call is not the
// plain case.

bool SizeOf(const Size& size, const Arguments& arguments, int64_t* value) {
  if (const TensorView* view = arguments.view(size.place)) {
    const Py_ssize_t dim = size.dim < 0 ? size.dim + view->ndim : size.dim;
    if (dim < 0 || dim >= view->ndim) return false;
    *value = view->shape[dim];
  } else {
    long long number = 0;
    if (!arguments.ReadInt(size.place, &number) || number < 0) return false;
    *value = number;
  }
  if (size.divisor == 1 || (size.unless >= 0 && arguments.IsGiven(size.unless))) return true;
  if (*value % size.divisor != 0) return false;
  *value /= size.divisor;
  return true;
}

PyObject* SizesOf(const Output& output, const TensorView& like, const Arguments& arguments) {
  const Py_ssize_t batch = output.batched ? like.ndim - output.dropped : 0;
  if (batch < 0) return nullptr;
  Reference sizes(PyTuple_New(batch + output.sizes.count));
  if (!sizes) return nullptr;
  for (Py_ssize_t i = 0; i < batch + output.sizes.count; ++i) {
    int64_t value = 0;
    if (i < batch) {
      value = like.shape[i];
    } else if (!SizeOf(output.sizes.items[i - batch], arguments, &value)) {
      return nullptr;
    }
    PyObject* size = PyLong_FromLongLong(value);
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
  const Reference sizes(SizesOf(output, *like, arguments));
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

bool HasPlainLayout(const EagerCall& call, const Arguments& arguments) {
  for (const Py_ssize_t place : call.tensors) {
    if (!arguments.IsGiven(place)) continue;
    if (call.absent >> place & 1) return false;
    const TensorView* view = arguments.view(place);
    if (view == nullptr) return false;
    if ((call.contiguous >> place & 1) && !IsContiguous(*view)) return false;
  }
  for (const Rank& rule : call.ranks) {
    const TensorView* view = arguments.view(rule.place);
    if (view == nullptr || view->ndim != rule.rank) return false;
  }
  for (const Equal& rule : call.equals) {
    const TensorView* view = arguments.view(rule.place);
    long long number = 0;
    if (view == nullptr || rule.dim >= view->ndim || !arguments.ReadInt(rule.number, &number) ||
        view->shape[rule.dim] != number) {
      return false;
    }
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
