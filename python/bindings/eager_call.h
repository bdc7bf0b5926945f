// SPDX-License-Identifier: Apache-2.0
// tiercel._C.EagerCall: an eager call of an operator, from plain tensors to the launch, without
// Python in between. tiercel.core.dispatch makes one for each operator.
//
//   eager_call.cc         runs a call
//   eager_outputs.cc      reads its tensors and makes its outputs
//   call_layout.h         the layouts and sizes, which native_op.cc needs too
//   eager_description.cc  makes an EagerCall of its description
//   eager_forms.cc        EagerInto and EagerFilled: the same call with its arguments in other
//   forms
#ifndef PYTHON_BINDINGS_EAGER_CALL_H_
#define PYTHON_BINDINGS_EAGER_CALL_H_

#include <Python.h>

#include <cstdint>

#include "python/bindings/call_layout.h"

namespace tiercel::python {

// One argument of the native function.
struct Slot {
  enum Kind { kArgument, kOutput, kLookup, kConstant } kind;
  Py_ssize_t index;
  PyObject* value;  // the table of a lookup, or a constant
};

using Output = OutputOf<PyObject*>;

// An operator's own; lives as long as the process.
struct EagerCall {
  PyObject_HEAD vectorcallfunc vectorcall;
  Py_ssize_t count;  // of the operator's arguments, `backend` last
  Layout layout;
  Few<Py_ssize_t, kMaxTensors> mutated;  // places of the arguments that are written to
  PyObject* ready;                       // set of devices that sm90 runs on
  PyObject* run;                         // sm90 in Python: (*arguments) -> outputs
  PyObject* recover;                     // (error, backend, arguments) -> outputs, or raises
  PyObject* fallback;                    // (*arguments) -> outputs: every other call
  PyObject* increment_version;
  PyObject* name_sm90;
  PyObject* native;  // a function of this module, or None: `run` is called
  bool returns;      // the native function returns the outputs itself
  Few<Slot, 32> slots;
  Few<Output, kMaxOutputs> outputs;
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
