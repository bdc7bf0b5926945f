// SPDX-License-Identifier: Apache-2.0
// tiercel._C.EagerCall: an eager call of an operator, from plain tensors to the launch, without
// Python in between.
//
//   route   the tensor arguments are torch's own, nothing watches, no gradient is wanted
//   choose  sm90 applies: no other backend was asked for, and it runs on the tensors' device
//   launch  the outputs are allocated, and the native function gets its arguments
//
// Every other call goes on to a Python function that knows all cases: `fallback` if the route or
// the backend differs, `run` if only the layout does.
//
// tiercel._C.EagerInto: the same call with the results to write to first, as `out=` gives them.
// tiercel._C.EagerFilled: the same call as torch's dispatcher makes it, which leaves out trailing
// default values and passes the results to write to by name. It may also stand in for an operator
// of torch.ops: a plain call then needs no dispatcher. Compiled graphs pass optional arguments by
// name.
#include "python/bindings/eager_call.h"

#include <structmember.h>

#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "python/bindings/allocate.h"
#include "python/bindings/eager.h"
#include "python/bindings/eager_rules.h"

namespace tiercel::python {
namespace {

// The type of EagerCall, for IsEagerCall.
PyTypeObject* eager_call_type = nullptr;

// Set by set_overriding: true if a backend was asked for outside of the call. Calls from C++ read
// it without the GIL.
std::atomic<bool> overriding{false};

// How many calls of this thread go to the dispatcher because they are not plain, and the exception
// of the innermost that C++ code then carried.
thread_local int watched_calls = 0;
thread_local PyObject* carried_error = nullptr;

// The tensor arguments of one call that are not None, read once.
class Tensors {
 public:
  Tensors(const EagerCall* self, PyObject* const* args) {
    places_.fill(-1);
    for (Py_ssize_t i = 0; i < self->tensor_count; ++i) {
      const Py_ssize_t place = self->tensors[i];
      if (args[place] == Py_None && i > 0) continue;
      places_[place] = static_cast<signed char>(count_);
      objects_[count_++] = args[place];
    }
  }

  bool FindRoute(Route* route) { return python::FindRoute(objects_.data(), count_, &read_, route); }

  // Null where argument `place` is None, no tensor argument, or could not be read.
  const TensorView* view(Py_ssize_t place) const {
    return places_[place] < 0 ? nullptr : read_.view(places_[place]);
  }
  const TensorView* first() const { return read_.view(0); }

  // The native function finds them from here on.
  void Use() { read_.Use(); }

 private:
  Py_ssize_t count_ = 0;
  std::array<PyObject*, kMaxTensors> objects_;
  std::array<signed char, kMaxArguments> places_;
  TensorsOfCall read_;
};

// 1 for yes, 0 for no, -1 with a Python exception.
int TakesSm90(const EagerCall* self, PyObject* const* args, const Tensors& tensors) {
  PyObject* backend = args[self->count - 1];
  if (backend == Py_None) {
    if (overriding) return 0;
  } else if (backend != self->name_sm90) {
    if (!PyUnicode_Check(backend)) return 0;
    const int differs = PyUnicode_Compare(backend, self->name_sm90);
    if (differs != 0) return PyErr_Occurred() ? -1 : 0;
  }
  const TensorView* first = tensors.first();
  const bool on_gpu = first != nullptr && first->device_type == DeviceType::kCUDA;
  PyObject* device =
      on_gpu ? PyLong_FromLong(first->device_index) : DeviceOf(args[self->tensors[0]]);
  if (device == nullptr) return -1;
  const int ready = PySet_Contains(self->ready, device);
  Py_DECREF(device);
  return ready;
}

PyObject* ArgumentTuple(PyObject* const* args, Py_ssize_t count) {
  PyObject* tuple = PyTuple_New(count);
  if (tuple == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(tuple, i, Py_NewRef(args[i]));
  return tuple;
}

// Python's `except Exception as error: return recover(...)`.
PyObject* Recover(const EagerCall* self, PyObject* const* args) {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  if (trace != nullptr) PyException_SetTraceback(error, trace);
  PyObject* tuple = ArgumentTuple(args, self->count);
  PyObject* outputs = nullptr;
  if (tuple != nullptr) {
    outputs =
        PyObject_CallFunctionObjArgs(self->recover, error, args[self->count - 1], tuple, nullptr);
  }
  Py_XDECREF(tuple);
  Py_XDECREF(type);
  Py_XDECREF(error);
  Py_XDECREF(trace);
  return outputs;
}

bool CountAsWritten(const EagerCall* self, PyObject* const* args) {
  const Py_ssize_t count = PyTuple_GET_SIZE(self->mutated);
  std::array<PyObject*, kMaxTensors> given;
  Py_ssize_t given_count = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* tensor = args[PyLong_AsSsize_t(PyTuple_GET_ITEM(self->mutated, i))];
    if (tensor != Py_None) given[given_count++] = tensor;
  }
  PyObject* written = PyTuple_New(given_count);
  if (written == nullptr) return false;
  for (Py_ssize_t i = 0; i < given_count; ++i) {
    PyTuple_SET_ITEM(written, i, Py_NewRef(given[i]));
  }
  PyObject* none = PyObject_CallOneArg(self->increment_version, written);
  Py_DECREF(written);
  Py_XDECREF(none);
  return none != nullptr;
}

// False without a Python exception where it is not an int.
bool ReadInt(PyObject* value, long long* number) {
  if (!PyLong_CheckExact(value)) return false;
  *number = PyLong_AsLongLong(value);
  if (*number == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  return true;
}

// The arguments of one call, for the rules of eager_rules.h.
struct Arguments {
  bool IsGiven(Py_ssize_t place) const { return args[place] != Py_None; }
  const TensorView* view(Py_ssize_t place) const { return tensors.view(place); }
  bool ReadInt(Py_ssize_t place, long long* number) const {
    return python::ReadInt(args[place], number);
  }

  PyObject* const* args;
  const Tensors& tensors;
};

// The next three return null without a Python exception where the call is not the plain case.

PyObject* SizesOf(const Output& output, PyObject* const* args, const Tensors& tensors) {
  const TensorView& like = *tensors.view(output.like);
  const Py_ssize_t batch = output.batched ? like.ndim - output.dropped : 0;
  if (batch < 0) return nullptr;
  PyObject* sizes = PyTuple_New(batch + output.count);
  for (Py_ssize_t i = 0; sizes != nullptr && i < batch + output.count; ++i) {
    int64_t value = i < batch ? like.shape[i] : 0;
    PyObject* size = nullptr;
    if (i < batch || SizeOf(output.sizes[i - batch], Arguments{args, tensors}, &value)) {
      size = PyLong_FromLongLong(value);
    }
    if (size != nullptr) {
      PyTuple_SET_ITEM(sizes, i, size);
    } else {
      Py_CLEAR(sizes);
    }
  }
  return sizes;
}

PyObject* MakeOutput(const Output& output, PyObject* const* args, const Tensors& tensors) {
  PyObject* sizes = tensors.view(output.like) ? SizesOf(output, args, tensors) : nullptr;
  if (sizes == nullptr) return nullptr;
  PyObject* dtype = output.dtype;
  if (output.other_dtype != nullptr && args[output.other_place] != Py_None) {
    dtype = Py_NewRef(output.other_dtype);
  } else if (dtype == nullptr) {
    dtype = args[output.dtype_place];
    dtype = tensors.view(output.dtype_place) ? DTypeObjectOf(dtype) : Py_NewRef(dtype);
  } else {
    Py_INCREF(dtype);
  }
  if (dtype != nullptr && dtype == output.unwanted) {  // dtypes are singletons
    Py_DECREF(dtype);
    dtype = Py_NewRef(output.instead);
  }
  PyObject* made = dtype == nullptr ? nullptr : NewTensor(args[output.like], sizes, dtype);
  Py_XDECREF(dtype);
  Py_DECREF(sizes);
  return made;
}

// A borrowed reference; null also where the table has nothing for the argument.
PyObject* LookUp(const Slot& slot, PyObject* const* args) {
  PyObject* key = args[slot.index];
  // Others may not be hashable.
  if (key != Py_None && !PyUnicode_CheckExact(key) && !PyLong_CheckExact(key)) return nullptr;
  return PyDict_GetItemWithError(slot.value, key);
}

// The operator's result: None, a tensor, or a tuple of them. Takes the references.
PyObject* Pack(const EagerCall* self, PyObject* const* outputs) {
  const Py_ssize_t count = self->output_count;
  if (count == 0) Py_RETURN_NONE;
  if (count == 1) return outputs[0];
  PyObject* tuple = PyTuple_New(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (tuple == nullptr) {
      Py_DECREF(outputs[i]);
    } else {
      PyTuple_SET_ITEM(tuple, i, outputs[i]);
    }
  }
  return tuple;
}

// The outputs and the launch. Null with a Python exception; `plain` is false where there is none
// and nothing was done.
PyObject* Launch(const EagerCall* self, PyObject* const* args, const Tensors& tensors,
                 bool* plain) {
  *plain = HasPlainLayout(*self, Arguments{args, tensors});
  if (!*plain) return nullptr;
  std::array<PyObject*, kMaxOutputs> outputs;
  Py_ssize_t made = 0;
  const auto drop = [&](bool was_plain) -> PyObject* {
    for (Py_ssize_t i = 0; i < made; ++i) Py_DECREF(outputs[i]);
    *plain = was_plain || PyErr_Occurred();
    return nullptr;
  };
  for (; made < self->output_count; ++made) {
    outputs[made] = MakeOutput(self->outputs[made], args, tensors);
    if (outputs[made] == nullptr) return drop(false);
  }
  std::array<PyObject*, kMaxSlots> values;
  for (Py_ssize_t i = 0; i < self->slot_count; ++i) {
    const Slot& slot = self->slots[i];
    values[i] = slot.kind == Slot::kArgument ? args[slot.index]
                : slot.kind == Slot::kOutput ? outputs[slot.index]
                : slot.kind == Slot::kLookup ? LookUp(slot, args)
                                             : slot.value;
    if (values[i] == nullptr) return drop(false);
  }
  PyObject* launched = PyObject_Vectorcall(self->native, values.data(), self->slot_count, nullptr);
  if (launched == nullptr) return drop(true);
  if (self->returns) return launched;
  Py_DECREF(launched);
  return Pack(self, outputs.data());
}

// The call with all arguments, or what `elsewhere` returns where it is not the plain case.
template <typename Elsewhere>
PyObject* CallOr(const EagerCall* self, PyObject* const* args, Elsewhere&& elsewhere) {
  PyObject* outputs = nullptr;
  bool launched = false;
  {
    Route route;
    Tensors tensors(self, args);
    if (!tensors.FindRoute(&route)) return nullptr;
    const int chosen = route == Route::kDirect ? TakesSm90(self, args, tensors) : 0;
    if (chosen < 0) return nullptr;
    if (chosen == 0) return elsewhere();
    if (self->native != Py_None) {
      tensors.Use();
      outputs = Launch(self, args, tensors, &launched);
    }
  }
  // Python may change tensors, so what was read of them is no longer in use here.
  if (!launched) outputs = PyObject_Vectorcall(self->run, args, self->count, nullptr);
  if (outputs == nullptr) outputs = Recover(self, args);
  if (outputs == nullptr) return nullptr;
  if (PyTuple_GET_SIZE(self->mutated) > 0 && !CountAsWritten(self, args)) Py_CLEAR(outputs);
  return outputs;
}

PyObject* Call(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  const auto* self = reinterpret_cast<const EagerCall*>(object);
  const auto elsewhere = [&] { return PyObject_Vectorcall(self->fallback, args, flags, names); };
  if (PyVectorcall_NARGS(flags) != self->count || names != nullptr) return elsewhere();
  return CallOr(self, args, elsewhere);
}

// outputs(*arguments): the outputs that a launch would fill, or None where only Python can make
// them.
PyObject* Outputs(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  const auto* self = reinterpret_cast<const EagerCall*>(object);
  if (count != self->count || self->output_count == 0) Py_RETURN_NONE;
  Route route;
  Tensors tensors(self, args);
  if (!tensors.FindRoute(&route)) return nullptr;
  if (route != Route::kDirect) Py_RETURN_NONE;
  PyObject* outputs = PyTuple_New(self->output_count);
  for (Py_ssize_t i = 0; outputs != nullptr && i < self->output_count; ++i) {
    PyObject* made = MakeOutput(self->outputs[i], args, tensors);
    if (made == nullptr) {
      Py_DECREF(outputs);
      if (PyErr_Occurred()) return nullptr;
      Py_RETURN_NONE;
    }
    PyTuple_SET_ITEM(outputs, i, made);
  }
  return outputs;
}

// An operator's call that writes to given results; lives as long as the process.
struct EagerInto {
  PyObject_HEAD vectorcallfunc vectorcall;
  EagerCall* call;     // its arguments: the op's, the results, `backend`
  Py_ssize_t results;  // how many there are
  PyObject* fallback;  // (out, *arguments, backend) -> out: every other call
};

PyObject* CallInto(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  const auto* self = reinterpret_cast<const EagerInto*>(object);
  const Py_ssize_t count = self->call->count, given = count - self->results;  // with `backend`
  PyObject* out = PyVectorcall_NARGS(flags) > 0 ? args[0] : nullptr;
  const bool single = self->results == 1;
  if (PyVectorcall_NARGS(flags) != given + 1 || names != nullptr ||
      !(single || (PyTuple_CheckExact(out) && PyTuple_GET_SIZE(out) == self->results))) {
    return PyObject_Vectorcall(self->fallback, args, flags, names);
  }
  std::array<PyObject*, kMaxArguments> all;
  Py_ssize_t next = 0;
  for (Py_ssize_t i = 1; i < given; ++i) all[next++] = args[i];
  for (Py_ssize_t i = 0; i < self->results; ++i) {
    all[next++] = single ? out : PyTuple_GET_ITEM(out, i);
  }
  all[next] = args[given];
  PyObject* done = Call(reinterpret_cast<PyObject*>(self->call), all.data(), count, nullptr);
  if (done == nullptr) return nullptr;
  Py_DECREF(done);
  return Py_NewRef(out);
}

struct EagerFilled {
  PyObject_HEAD vectorcallfunc vectorcall;
  EagerCall* call;
  PyObject* names;     // of all arguments, interned, a tuple
  PyObject* defaults;  // one for each argument, a tuple; ... for those that a call has to give
  Py_ssize_t outs;     // how many of them, before the last one, are never positional
  PyObject* fallback;  // (*arguments, **named) -> outputs: every other call
  bool stands_in;      // for `fallback`, an operator
};

// -1 for the name of no argument.
Py_ssize_t PlaceOf(PyObject* name, PyObject* names) {
  const Py_ssize_t count = PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (PyTuple_GET_ITEM(names, i) == name) return i;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (PyUnicode_Compare(PyTuple_GET_ITEM(names, i), name) == 0) return i;
  }
  return -1;
}

// False where the call does not fit.
bool Fill(const EagerFilled* self, PyObject* const* args, Py_ssize_t given, PyObject* names,
          PyObject** all) {
  const Py_ssize_t count = self->call->count, first = count - 1 - self->outs;
  if (given > first + 1) return false;
  for (Py_ssize_t i = 0; i < given; ++i) all[i < first ? i : count - 1] = args[i];
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    const Py_ssize_t place = PlaceOf(PyTuple_GET_ITEM(names, i), self->names);
    if (place < 0 || all[place] != nullptr) return false;
    all[place] = args[given + i];
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (all[i] == nullptr) all[i] = PyTuple_GET_ITEM(self->defaults, i);
    if (all[i] == Py_Ellipsis) return false;
  }
  return true;
}

// The call that goes to the dispatcher, or to Python.
PyObject* CallWatched(const EagerFilled* self, PyObject* const* args, size_t flags,
                      PyObject* names) {
  if (!self->stands_in) return PyObject_Vectorcall(self->fallback, args, flags, names);
  ++watched_calls;
  PyObject* outputs = PyObject_Vectorcall(self->fallback, args, flags, names);
  --watched_calls;
  PyObject* error = std::exchange(carried_error, nullptr);
  if (outputs == nullptr && error != nullptr) {
    PyErr_Clear();
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  }
  Py_XDECREF(error);
  return outputs;
}

PyObject* CallFilled(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  const auto* self = reinterpret_cast<const EagerFilled*>(object);
  const auto elsewhere = [&] { return CallWatched(self, args, flags, names); };
  std::array<PyObject*, kMaxArguments> all{};
  if (!Fill(self, args, PyVectorcall_NARGS(flags), names, all.data())) return elsewhere();
  if (!self->stands_in) {
    return Call(reinterpret_cast<PyObject*>(self->call), all.data(), self->call->count, nullptr);
  }
  const int profiled = IsProfiled();
  if (profiled != 0) return profiled < 0 ? nullptr : elsewhere();
  return CallOr(self->call, all.data(), elsewhere);
}

// torch keeps operators in dicts by this hash.
Py_hash_t HashFilled(PyObject* object) {
  return PyObject_Hash(reinterpret_cast<const EagerFilled*>(object)->fallback);
}

PyObject* AttributeOfFilled(PyObject* object, PyObject* name) {
  const auto* self = reinterpret_cast<const EagerFilled*>(object);
  return self->stands_in ? PyObject_GetAttr(self->fallback, name)
                         : PyObject_GenericGetAttr(object, name);
}

bool Fail(const char* text) {
  PyErr_Format(PyExc_ValueError, "EagerCall: %s", text);
  return false;
}

bool IsPlace(const EagerCall* self, Py_ssize_t place) { return place >= 0 && place < self->count; }

// Calls `read(item)` for each item of a tuple, of which there may be `most`.
template <typename Read>
bool ReadEach(PyObject* items, Py_ssize_t most, const char* many, Read&& read) {
  if (PyTuple_GET_SIZE(items) > most) return Fail(many);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); ++i) {
    if (!read(PyTuple_GET_ITEM(items, i))) return false;
  }
  return true;
}

bool ReadPlace(const EagerCall* self, PyObject* item, Py_ssize_t* place) {
  *place = PyLong_AsSsize_t(item);
  if (*place == -1 && PyErr_Occurred()) return false;
  return IsPlace(self, *place) || Fail("a place is out of range");
}

// ("argument", place), ("output", place), ("lookup", (place, table)) or ("constant", value).
bool ReadSlot(EagerCall* self, PyObject* item) {
  const char* kind = nullptr;
  PyObject* value = nullptr;
  if (!PyArg_ParseTuple(item, "sO", &kind, &value)) return false;
  Slot& slot = self->slots[self->slot_count++];
  const bool lookup = std::strcmp(kind, "lookup") == 0;
  if (std::strcmp(kind, "constant") == 0) {
    slot.kind = Slot::kConstant;
    slot.value = Py_NewRef(value);
    return true;
  }
  if (lookup) {
    if (!PyArg_ParseTuple(value, "nO!", &slot.index, &PyDict_Type, &slot.value)) return false;
    Py_INCREF(slot.value);
  } else {
    slot.index = PyLong_AsSsize_t(value);
    if (slot.index == -1 && PyErr_Occurred()) return false;
  }
  const bool output = std::strcmp(kind, "output") == 0;
  slot.kind = lookup ? Slot::kLookup : output ? Slot::kOutput : Slot::kArgument;
  const Py_ssize_t end = output ? self->output_count : self->count;
  return (slot.index >= 0 && slot.index < end) || Fail("a slot's place is out of range");
}

// (like, dtype or its argument's place, dropped or None, ((place, dim, divisor, unless), ...),
// (place, dtype if that argument is given) or None[, (dtype, what takes its place) or None])
bool ReadOutput(EagerCall* self, PyObject* item) {
  Output& output = self->outputs[self->output_count++];
  PyObject *dtype = nullptr, *dropped = nullptr, *sizes = nullptr, *other = nullptr;
  PyObject* replaced = Py_None;
  if (!PyArg_ParseTuple(item, "nOOO!O|O", &output.like, &dtype, &dropped, &PyTuple_Type, &sizes,
                        &other, &replaced)) {
    return false;
  }
  if (replaced != Py_None) {
    if (!PyArg_ParseTuple(replaced, "OO", &output.unwanted, &output.instead)) return false;
    Py_INCREF(output.unwanted);
    Py_INCREF(output.instead);
  }
  if (other != Py_None) {
    if (!PyArg_ParseTuple(other, "nO", &output.other_place, &output.other_dtype)) return false;
    if (!IsPlace(self, output.other_place)) return Fail("a dtype depends on no argument");
    Py_INCREF(output.other_dtype);
  }
  if (!IsPlace(self, output.like)) return Fail("an output is like no argument");
  output.dtype_place = output.like;
  if (!PyLong_CheckExact(dtype)) {
    output.dtype = Py_NewRef(dtype);
  } else if (!ReadPlace(self, dtype, &output.dtype_place)) {
    return false;
  }
  output.batched = dropped != Py_None;
  if (output.batched) output.dropped = PyLong_AsSsize_t(dropped);
  if (PyErr_Occurred()) return false;
  return ReadEach(sizes, kMaxSizes, "an output has too many sizes", [&](PyObject* size) {
    Size& to = output.sizes[output.count++];
    if (!PyArg_ParseTuple(size, "nnLn", &to.place, &to.dim, &to.divisor, &to.unless)) return false;
    return (IsPlace(self, to.place) && to.divisor > 0 && to.unless < self->count) ||
           Fail("a size is no argument's");
  });
}

PyObject* New(PyTypeObject* type, PyObject* positional, PyObject* keywords) {
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
    Fail("wrong number of arguments");
    return nullptr;
  }
  auto* self = reinterpret_cast<EagerCall*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->vectorcall = Call;
  self->count = count;
  self->mutated = Py_NewRef(mutated);
  self->ready = Py_NewRef(ready);
  self->run = Py_NewRef(run);
  self->recover = Py_NewRef(recover);
  self->fallback = Py_NewRef(fallback);
  self->increment_version = Py_NewRef(increment_version);
  self->native = Py_NewRef(native);
  self->returns = returns != 0;
  self->name_sm90 = PyUnicode_InternFromString("sm90");
  const auto add_place = [&](PyObject* item) {
    return ReadPlace(self, item, &self->tensors[self->tensor_count++]);
  };
  const auto check_place = [&](PyObject* item) {
    Py_ssize_t place;
    return ReadPlace(self, item, &place);
  };
  const auto add_contiguous = [&](PyObject* item) {
    Py_ssize_t place;
    if (!ReadPlace(self, item, &place)) return false;
    self->contiguous |= uint64_t{1} << place;
    return true;
  };
  const auto add_absent = [&](PyObject* item) {
    Py_ssize_t place;
    if (!ReadPlace(self, item, &place)) return false;
    self->absent |= uint64_t{1} << place;
    return true;
  };
  const auto add_rank = [&](PyObject* item) {
    Rank& rank = self->ranks[self->rank_count++];
    return PyArg_ParseTuple(item, "nn", &rank.place, &rank.rank) &&
           (IsPlace(self, rank.place) || Fail("a place is out of range"));
  };
  const auto add_equal = [&](PyObject* item) {
    Equal& rule = self->equals[self->equal_count++];
    return PyArg_ParseTuple(item, "nnn", &rule.place, &rule.dim, &rule.number) &&
           ((IsPlace(self, rule.place) && IsPlace(self, rule.number) && rule.dim >= 0) ||
            Fail("a place is out of range"));
  };
  const auto add_output = [&](PyObject* item) { return ReadOutput(self, item); };
  const auto add_slot = [&](PyObject* item) { return ReadSlot(self, item); };
  if (ReadEach(tensors, kMaxTensors, "too many tensors", add_place) &&
      ReadEach(mutated, kMaxTensors, "too many tensors", check_place) &&
      ReadEach(contiguous, kMaxTensors, "too many tensors", add_contiguous) &&
      ReadEach(absent, kMaxTensors, "too many tensors", add_absent) &&
      ReadEach(ranks, kMaxRules, "too many ranks", add_rank) &&
      ReadEach(equals, kMaxRules, "too many equal sizes", add_equal) &&
      ReadEach(outputs, kMaxOutputs, "too many outputs", add_output) &&
      ReadEach(slots, kMaxSlots, "too many slots", add_slot)) {
    return reinterpret_cast<PyObject*>(self);
  }
  Py_DECREF(self);
  return nullptr;
}

PyObject* SetOverriding(PyObject*, PyObject* value) {
  const int truth = PyObject_IsTrue(value);
  if (truth < 0) return nullptr;
  overriding.store(truth != 0, std::memory_order_relaxed);
  Py_RETURN_NONE;
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(EagerCall, vectorcall), READONLY, nullptr},
    {"run", T_OBJECT_EX, offsetof(EagerCall, run), 0, "sm90 in Python."},
    {"native", T_OBJECT, offsetof(EagerCall, native), 0, "sm90's function, or None for `run`."},
    {nullptr, 0, 0, 0, nullptr},
};

PyMethodDef methods[] = {
    {"outputs", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Outputs)), METH_FASTCALL,
     "outputs(*arguments)\n--\n\nThe outputs that a launch would fill, or None where only Python "
     "can make them."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot type_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(New)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, members},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>("An operator's eager call, see tiercel.core.op.")},
    {0, nullptr},
};

PyType_Spec type_spec = {"tiercel._C.EagerCall", sizeof(EagerCall), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, type_slots};

PyObject* NewInto(PyTypeObject* type, PyObject* positional, PyObject* keywords) {
  static const char* names[] = {"", "", "", nullptr};
  PyObject *call, *fallback;
  Py_ssize_t results;
  if (!PyArg_ParseTupleAndKeywords(positional, keywords, "OnO:EagerInto", const_cast<char**>(names),
                                   &call, &results, &fallback)) {
    return nullptr;
  }
  if (!IsEagerCall(call)) return nullptr;
  auto* eager = reinterpret_cast<EagerCall*>(call);
  if (results < 1 || results > eager->count - 2) {
    Fail("wrong number of results");
    return nullptr;
  }
  auto* self = reinterpret_cast<EagerInto*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->vectorcall = CallInto;
  self->call = reinterpret_cast<EagerCall*>(Py_NewRef(call));
  self->results = results;
  self->fallback = Py_NewRef(fallback);
  return reinterpret_cast<PyObject*>(self);
}

PyMemberDef into_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(EagerInto, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot into_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(NewInto)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, into_members},
    {Py_tp_doc, const_cast<char*>("EagerInto(call, results, fallback, /)\n--\n\n"
                                  "(out, *arguments) -> out, written by an EagerCall.")},
    {0, nullptr},
};

PyType_Spec into_spec = {"tiercel._C.EagerInto", sizeof(EagerInto), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, into_slots};

PyObject* NewFilled(PyTypeObject* type, PyObject* positional, PyObject* keywords) {
  static const char* parameters[] = {"", "", "", "", "", "stands_in", nullptr};
  PyObject *call, *names, *defaults, *fallback;
  Py_ssize_t outs;
  int stands_in = 0;
  if (!PyArg_ParseTupleAndKeywords(positional, keywords, "OO!O!nO|$p:EagerFilled",
                                   const_cast<char**>(parameters), &call, &PyTuple_Type, &names,
                                   &PyTuple_Type, &defaults, &outs, &fallback, &stands_in)) {
    return nullptr;
  }
  if (!IsEagerCall(call)) return nullptr;
  auto* eager = reinterpret_cast<EagerCall*>(call);
  if (PyTuple_GET_SIZE(names) != eager->count || PyTuple_GET_SIZE(defaults) != eager->count ||
      outs < 0 || outs > eager->count - 2) {
    Fail("wrong number of names, defaults or results");
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < eager->count; ++i) {
    if (!PyUnicode_CheckExact(PyTuple_GET_ITEM(names, i))) {
      Fail("a name is no str");
      return nullptr;
    }
  }
  auto* self = reinterpret_cast<EagerFilled*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->vectorcall = CallFilled;
  self->call = reinterpret_cast<EagerCall*>(Py_NewRef(call));
  self->names = Py_NewRef(names);
  self->defaults = Py_NewRef(defaults);
  self->outs = outs;
  self->fallback = Py_NewRef(fallback);
  self->stands_in = stands_in != 0;
  return reinterpret_cast<PyObject*>(self);
}

PyMemberDef filled_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(EagerFilled, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot filled_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(NewFilled)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, filled_members},
    {Py_tp_hash, reinterpret_cast<void*>(HashFilled)},
    {Py_tp_getattro, reinterpret_cast<void*>(AttributeOfFilled)},
    {Py_tp_doc,
     const_cast<char*>("EagerFilled(call, names, defaults, outs, fallback, /, *, stands_in=False)"
                       "\n--\n\n(*arguments, **outs), from torch's dispatcher; or "
                       "in the place of an operator, which is `fallback` then.")},
    {0, nullptr},
};

PyType_Spec filled_spec = {"tiercel._C.EagerFilled", sizeof(EagerFilled), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, filled_slots};

PyMethodDef functions[] = {
    {"set_overriding", SetOverriding, METH_O,
     "set_overriding(value, /)\n--\n\nWhether a backend was asked for outside of the call."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool IsEagerCall(PyObject* call) {
  if (Py_TYPE(call) == eager_call_type) return true;
  PyErr_SetString(PyExc_TypeError, "the call must be an EagerCall");
  return false;
}

bool IsOverriding() { return overriding.load(std::memory_order_relaxed); }

bool IsWatchedCall() { return watched_calls > 0; }

void CarryError() {
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  if (trace != nullptr && error != nullptr) PyException_SetTraceback(error, trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  Py_XSETREF(carried_error, error);
}

PyObject* MakeEagerCallType() {
  PyObject* type = PyType_FromSpec(&type_spec);
  eager_call_type = reinterpret_cast<PyTypeObject*>(Py_XNewRef(type));
  return type;
}

PyObject* MakeEagerIntoType() { return PyType_FromSpec(&into_spec); }

PyObject* MakeEagerFilledType() { return PyType_FromSpec(&filled_spec); }

PyMethodDef* EagerCallFunctions() { return functions; }

}  // namespace tiercel::python
