// SPDX-License-Identifier: Apache-2.0
// tiercel._C.EagerCall: an eager call of an operator, from plain tensors to the launch, without
// Python in between. tiercel.core.dispatch makes one for each operator.
//
//   eager_call.cc         runs a call
//   eager_outputs.cc      reads its tensors and makes its outputs
//   eager_description.cc  makes an EagerCall of its description
//   eager_forms.cc        EagerInto and EagerFilled: the same call with its arguments in other
//   forms
#ifndef PYTHON_BINDINGS_EAGER_CALL_H_
#define PYTHON_BINDINGS_EAGER_CALL_H_

#include <Python.h>

#include <cstdint>

namespace tiercel::python {

constexpr Py_ssize_t kMaxArguments = 32;
constexpr Py_ssize_t kMaxTensors = 16;
constexpr Py_ssize_t kMaxOutputs = 5;

// Up to kMost items, in place.
template <typename Item, Py_ssize_t kMost_>
struct Few {
  static constexpr Py_ssize_t kMost = kMost_;

  Py_ssize_t count;
  Item items[kMost];

  const Item* begin() const { return items; }
  const Item* end() const { return items + count; }
};

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
  Few<Size, 4> sizes;
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
  Py_ssize_t count;                      // of the operator's arguments, `backend` last
  Few<Py_ssize_t, kMaxTensors> tensors;  // places of the tensor arguments, which may be None
  Few<Py_ssize_t, kMaxTensors> mutated;  // places of the arguments that are written to
  PyObject* ready;                       // set of devices that sm90 runs on
  PyObject* run;                         // sm90 in Python: (*arguments) -> outputs
  PyObject* recover;                     // (error, backend, arguments) -> outputs, or raises
  PyObject* fallback;                    // (*arguments) -> outputs: every other call
  PyObject* increment_version;
  PyObject* name_sm90;
  PyObject* native;     // a function of this module, or None: `run` is called
  bool returns;         // the native function returns the outputs itself
  uint64_t contiguous;  // bit i: argument i is contiguous
  uint64_t absent;      // bit i: argument i is None
  Few<Slot, 32> slots;
  Few<Output, kMaxOutputs> outputs;
  Few<Rank, 16> ranks;
  Few<Equal, 16> equals;
};

// A function that takes what is not the plain case, with the call's arguments as they came.
struct Elsewhere {
  PyObject* function;
  PyObject* const* args;
  size_t flags;
  PyObject* names;

  PyObject* operator()() const { return PyObject_Vectorcall(function, args, flags, names); }
};

// The call with all its arguments, or what `elsewhere` returns where it is not the plain case.
PyObject* CallOr(const EagerCall& call, PyObject* const* args, const Elsewhere& elsewhere);

// The call with all its arguments; its fallback takes what is not the plain case.
PyObject* CallEager(const EagerCall& call, PyObject* const* args);

// The type's vectorcall.
PyObject* VectorcallEager(PyObject* call, PyObject* const* args, size_t flags, PyObject* names);

// The type's constructor.
PyObject* NewEagerCall(PyTypeObject* type, PyObject* positional, PyObject* keywords);

// The EagerCall that an object is; null with a Python exception if it is none.
EagerCall* AsEagerCall(PyObject* object);

// Raises ValueError; returns null, as a failing function does.
PyObject* RefuseDescription(const char* text);

// The types tiercel._C.EagerCall, EagerInto and EagerFilled; EagerCall is made first. New
// references, or null with a Python exception.
PyObject* MakeEagerCallType();
PyObject* MakeEagerIntoType();
PyObject* MakeEagerFilledType();

// set_overriding, which tells all calls whether a backend was asked for outside of a call.
PyMethodDef* EagerCallFunctions();

}  // namespace tiercel::python

#endif  // PYTHON_BINDINGS_EAGER_CALL_H_
