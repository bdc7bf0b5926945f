// SPDX-License-Identifier: Apache-2.0
// EagerCall(...): reads the description of an operator's call, which tiercel.core.dispatch gives,
// and checks that it stays within its limits.
#include <cstring>

#include "python/bindings/eager_call.h"

namespace tiercel::python {
namespace {

// All functions here return false with a Python exception.

bool Read(const EagerCall& call, PyObject* item, Output* output);
bool Read(const EagerCall& call, PyObject* item, Slot* slot);

bool Fail(const char* text) { return RefuseDescription(text) != nullptr; }

bool IsPlace(const EagerCall& call, Py_ssize_t place) { return place >= 0 && place < call.count; }

bool Read(const EagerCall& call, PyObject* item, Py_ssize_t* place) {
  *place = PyLong_AsSsize_t(item);
  if (*place == -1 && PyErr_Occurred()) return false;
  return IsPlace(call, *place) || Fail("a place is out of range");
}

// (place, rank)
bool Read(const EagerCall& call, PyObject* item, Rank* rule) {
  return PyArg_ParseTuple(item, "nn", &rule->place, &rule->rank) &&
         (IsPlace(call, rule->place) || Fail("a place is out of range"));
}

// (place, dimension, number)
bool Read(const EagerCall& call, PyObject* item, Equal* rule) {
  return PyArg_ParseTuple(item, "nnn", &rule->place, &rule->dim, &rule->number) &&
         ((IsPlace(call, rule->place) && IsPlace(call, rule->number) && rule->dim >= 0) ||
          Fail("a place is out of range"));
}

// (place, dimension, divisor, unless)
bool Read(const EagerCall& call, PyObject* item, Size* size) {
  return PyArg_ParseTuple(item, "nnLn", &size->place, &size->dim, &size->divisor, &size->unless) &&
         ((IsPlace(call, size->place) && size->divisor > 0 && size->unless < call.count) ||
          Fail("a size is no argument's"));
}

// Reads each item of a tuple.
template <typename Entry, Py_ssize_t kMost>
bool ReadEach(const EagerCall& call, PyObject* items, const char* too_many,
              Few<Entry, kMost>* entries) {
  if (PyTuple_GET_SIZE(items) > kMost) return Fail(too_many);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); ++i) {
    if (!Read(call, PyTuple_GET_ITEM(items, i), &entries->items[entries->count++])) return false;
  }
  return true;
}

// Sets the bits of the places in a tuple.
bool ReadBits(const EagerCall& call, PyObject* items, uint64_t* bits) {
  Few<Py_ssize_t, kMaxTensors> places{};
  if (!ReadEach(call, items, "too many tensors", &places)) return false;
  for (const Py_ssize_t place : places) *bits |= uint64_t{1} << place;
  return true;
}

// (like, dtype or its argument's place, dropped or None, sizes, (place, dtype if that argument is
// given) or None[, (dtype, what takes its place) or None])
bool Read(const EagerCall& call, PyObject* item, Output* output) {
  PyObject *dtype, *dropped, *sizes, *other, *replaced = Py_None;
  if (!PyArg_ParseTuple(item, "nOOO!O|O", &output->like, &dtype, &dropped, &PyTuple_Type, &sizes,
                        &other, &replaced)) {
    return false;
  }
  if (!IsPlace(call, output->like)) return Fail("an output is like no argument");
  if (replaced != Py_None) {
    if (!PyArg_ParseTuple(replaced, "OO", &output->unwanted, &output->instead)) return false;
    Py_INCREF(output->unwanted);
    Py_INCREF(output->instead);
  }
  if (other != Py_None) {
    if (!PyArg_ParseTuple(other, "nO", &output->other_place, &output->other_dtype)) return false;
    if (!IsPlace(call, output->other_place)) return Fail("a dtype depends on no argument");
    Py_INCREF(output->other_dtype);
  }
  output->dtype_place = output->like;
  if (!PyLong_CheckExact(dtype)) {
    output->dtype = Py_NewRef(dtype);
  } else if (!Read(call, dtype, &output->dtype_place)) {
    return false;
  }
  output->batched = dropped != Py_None;
  if (output->batched) output->dropped = PyLong_AsSsize_t(dropped);
  if (PyErr_Occurred()) return false;
  return ReadEach(call, sizes, "an output has too many sizes", &output->sizes);
}

// ("argument", place), ("output", place), ("lookup", (place, table)) or ("constant", value)
bool Read(const EagerCall& call, PyObject* item, Slot* slot) {
  const char* kind;
  PyObject* value;
  if (!PyArg_ParseTuple(item, "sO", &kind, &value)) return false;
  if (std::strcmp(kind, "constant") == 0) {
    *slot = {Slot::kConstant, 0, Py_NewRef(value)};
    return true;
  }
  Py_ssize_t end = call.count;
  if (std::strcmp(kind, "lookup") == 0) {
    slot->kind = Slot::kLookup;
    if (!PyArg_ParseTuple(value, "nO!", &slot->index, &PyDict_Type, &slot->value)) return false;
    Py_INCREF(slot->value);
  } else {
    const bool output = std::strcmp(kind, "output") == 0;
    slot->kind = output ? Slot::kOutput : Slot::kArgument;
    if (output) end = call.outputs.count;
    slot->index = PyLong_AsSsize_t(value);
    if (slot->index == -1 && PyErr_Occurred()) return false;
  }
  return (slot->index >= 0 && slot->index < end) || Fail("a slot's place is out of range");
}

}  // namespace

PyObject* RefuseDescription(const char* text) {
  return PyErr_Format(PyExc_ValueError, "EagerCall: %s", text);
}

PyObject* NewEagerCall(PyTypeObject* type, PyObject* positional, PyObject* keywords) {
  static const char* names[] = {"count",  "tensors", "mutated",  "ready",
                                "run",    "recover", "fallback", "increment_version",
                                "native", "slots",   "outputs",  "contiguous",
                                "ranks",  "equals",  "returns",  "absent",
                                nullptr};
  Py_ssize_t count;
  PyObject *tensors, *mutated, *ready, *run, *recover, *fallback, *increment_version;
  PyObject *native, *slots, *outputs, *contiguous, *ranks, *equals, *absent;
  int returns = 0;
  if (!PyArg_ParseTupleAndKeywords(
          positional, keywords, "$nO!O!O!OOOOOO!O!O!O!O!pO!:EagerCall", const_cast<char**>(names),
          &count, &PyTuple_Type, &tensors, &PyTuple_Type, &mutated, &PySet_Type, &ready, &run,
          &recover, &fallback, &increment_version, &native, &PyTuple_Type, &slots, &PyTuple_Type,
          &outputs, &PyTuple_Type, &contiguous, &PyTuple_Type, &ranks, &PyTuple_Type, &equals,
          &returns, &PyTuple_Type, &absent)) {
    return nullptr;
  }
  if (count < 2 || count > kMaxArguments || PyTuple_GET_SIZE(tensors) < 1) {
    return RefuseDescription("wrong number of arguments");
  }
  auto* call = reinterpret_cast<EagerCall*>(type->tp_alloc(type, 0));
  if (call == nullptr) return nullptr;
  call->vectorcall = VectorcallEager;
  call->count = count;
  call->ready = Py_NewRef(ready);
  call->run = Py_NewRef(run);
  call->recover = Py_NewRef(recover);
  call->fallback = Py_NewRef(fallback);
  call->increment_version = Py_NewRef(increment_version);
  call->name_sm90 = PyUnicode_InternFromString("sm90");
  call->native = Py_NewRef(native);
  call->returns = returns != 0;
  if (ReadEach(*call, tensors, "too many tensors", &call->layout.tensors) &&
      ReadEach(*call, mutated, "too many tensors", &call->mutated) &&
      ReadBits(*call, contiguous, &call->layout.contiguous) &&
      ReadBits(*call, absent, &call->layout.absent) &&
      ReadEach(*call, ranks, "too many ranks", &call->layout.ranks) &&
      ReadEach(*call, equals, "too many equal sizes", &call->layout.equals) &&
      ReadEach(*call, outputs, "too many outputs", &call->outputs) &&
      ReadEach(*call, slots, "too many slots", &call->slots)) {
    return reinterpret_cast<PyObject*>(call);
  }
  Py_DECREF(call);
  return nullptr;
}

}  // namespace tiercel::python
