// SPDX-License-Identifier: Apache-2.0
// An operator's eager call as data, and the rules that need no Python: which arguments it takes
// without rearranging, and the sizes of its outputs. Calls from Python and from C++ share them.
#ifndef PYTHON_BINDINGS_EAGER_RULES_H_
#define PYTHON_BINDINGS_EAGER_RULES_H_

#include <Python.h>

#include <cstdint>

#include "kernels/sm90/tensor_view.h"

namespace tiercel::python {

constexpr Py_ssize_t kMaxArguments = 32;
constexpr Py_ssize_t kMaxTensors = 16;
constexpr Py_ssize_t kMaxOutputs = 5;
constexpr Py_ssize_t kMaxSlots = 32;
constexpr Py_ssize_t kMaxSizes = 4;
constexpr Py_ssize_t kMaxRules = 16;

// One argument of the native function.
struct Slot {
  enum Kind { kArgument, kOutput, kLookup, kConstant } kind;
  Py_ssize_t index;
  PyObject* value;  // the table of a lookup, or a constant
};

// A size of an output: argument `place`'s dimension `dim`, or its value if it is an int, divided by
// `divisor` unless argument `unless` (-1: none) is given.
struct Size {
  Py_ssize_t place, dim;
  long long divisor;
  Py_ssize_t unless;
};

// A contiguous output on the device of argument `like`.
struct Output {
  Py_ssize_t like;
  PyObject* dtype;  // null: that of argument `dtype_place`, or the dtype that it is
  Py_ssize_t dtype_place;
  PyObject* other_dtype;  // if argument `other_place` is given; null: never
  Py_ssize_t other_place;
  PyObject* unwanted;  // a dtype that `instead` takes the place of; null: none
  PyObject* instead;
  bool batched;  // begins with all dimensions of `like` but the last `dropped`
  Py_ssize_t dropped;
  Py_ssize_t count;
  Size sizes[kMaxSizes];
};

// Argument `place` has `rank` dimensions.
struct Rank {
  Py_ssize_t place, rank;
};

// Dimension `dim` of argument `place` is the int argument `number`.
struct Equal {
  Py_ssize_t place, dim, number;
};

// An operator's own; lives as long as the process.
struct EagerCall {
  PyObject_HEAD vectorcallfunc vectorcall;
  Py_ssize_t count;  // of the operator's arguments, `backend` last
  Py_ssize_t tensor_count;
  Py_ssize_t tensors[kMaxTensors];  // places of the tensor arguments, which may be None
  PyObject* mutated;                // places of the arguments that are written to, a tuple
  PyObject* ready;                  // set of devices that sm90 runs on
  PyObject* run;                    // sm90 in Python: (*arguments) -> outputs
  PyObject* recover;                // (error, backend, arguments) -> outputs, or raises
  PyObject* fallback;               // (*arguments) -> outputs: every other call
  PyObject* increment_version;
  PyObject* name_sm90;
  PyObject* native;     // a function of this module, or None: `run` is called
  bool returns;         // the native function returns the outputs itself
  uint64_t contiguous;  // bit i: argument i is contiguous
  uint64_t absent;      // bit i: argument i is None
  Py_ssize_t slot_count, output_count, rank_count, equal_count;
  Slot slots[kMaxSlots];
  Output outputs[kMaxOutputs];
  Rank ranks[kMaxRules];
  Equal equals[kMaxRules];
};

inline bool IsContiguous(const TensorView& view) {
  int64_t step = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    if (view.shape[i] == 0) return true;
    if (view.shape[i] != 1 && view.strides[i] != step) return false;
    step *= view.shape[i];
  }
  return true;
}

// `Arguments` has IsGiven(place), view(place), null where it is no tensor, and ReadInt(place, *).
template <typename Arguments>
bool HasPlainLayout(const EagerCall& call, const Arguments& arguments) {
  for (Py_ssize_t i = 0; i < call.tensor_count; ++i) {
    const Py_ssize_t place = call.tensors[i];
    if (!arguments.IsGiven(place)) continue;
    if (call.absent >> place & 1) return false;
    const TensorView* view = arguments.view(place);
    if (view == nullptr) return false;
    if ((call.contiguous >> place & 1) && !IsContiguous(*view)) return false;
  }
  for (Py_ssize_t i = 0; i < call.rank_count; ++i) {
    const TensorView* view = arguments.view(call.ranks[i].place);
    if (view == nullptr || view->ndim != call.ranks[i].rank) return false;
  }
  for (Py_ssize_t i = 0; i < call.equal_count; ++i) {
    const Equal& rule = call.equals[i];
    const TensorView* view = arguments.view(rule.place);
    long long number = 0;
    if (view == nullptr || rule.dim >= view->ndim || !arguments.ReadInt(rule.number, &number) ||
        view->shape[rule.dim] != number) {
      return false;
    }
  }
  return true;
}

// False where the call is not the plain case.
template <typename Arguments>
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

// Raises TypeError unless it is one.
bool IsEagerCall(PyObject* call);

// Tells if a backend was asked for outside of the call. Needs no GIL.
bool IsOverriding();

// Tells if this thread's call came through torch.ops from Python and was not plain: a mode, a
// subclass, a gradient. Python then decides.
bool IsWatchedCall();

// Takes the pending exception along to the Python code that called the dispatcher, past C++ code
// that knows no Python exceptions.
void CarryError();

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_EAGER_RULES_H_
