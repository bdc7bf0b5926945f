// SPDX-License-Identifier: Apache-2.0
// An EagerCall whose arguments come in another form.
//
//   EagerInto    the results to write to come first, as `out=` gives them
//   EagerFilled  the call as torch's dispatcher makes it, which leaves out trailing default values
//                and passes the results to write to by name. Compiled graphs pass optional
//                arguments by name. It may also stand in for an operator of torch.ops: a plain call
//                then needs no dispatcher.
#include <Python.h>
#include <structmember.h>

#include <array>

#include "python/bindings/eager.h"
#include "python/bindings/eager_call.h"

namespace tiercel::python {
namespace {

// Lives as long as the process.
struct EagerInto {
  PyObject_HEAD vectorcallfunc vectorcall;
  EagerCall* call;     // its arguments: the op's, the results, `backend`
  Py_ssize_t results;  // how many there are
  PyObject* fallback;  // (out, *arguments, backend) -> out: every other call
};

PyObject* CallInto(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  const auto* self = reinterpret_cast<const EagerInto*>(object);
  const Py_ssize_t given = self->call->count - self->results;  // with `backend`
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
  PyObject* done = CallEager(*self->call, all.data());
  if (done == nullptr) return nullptr;
  Py_DECREF(done);
  return Py_NewRef(out);
}

PyObject* NewInto(PyTypeObject* type, PyObject* positional, PyObject* keywords) {
  static const char* names[] = {"", "", "", nullptr};
  PyObject *object, *fallback;
  Py_ssize_t results;
  if (!PyArg_ParseTupleAndKeywords(positional, keywords, "OnO:EagerInto", const_cast<char**>(names),
                                   &object, &results, &fallback)) {
    return nullptr;
  }
  EagerCall* call = AsEagerCall(object);
  if (call == nullptr) return nullptr;
  if (results < 1 || results > call->count - 2) {
    return RefuseDescription("wrong number of results");
  }
  auto* self = reinterpret_cast<EagerInto*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->vectorcall = CallInto;
  self->call = call;
  self->results = results;
  self->fallback = Py_NewRef(fallback);
  Py_INCREF(object);
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

// Lives as long as the process.
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

PyObject* CallFilled(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  const auto* self = reinterpret_cast<const EagerFilled*>(object);
  const Elsewhere elsewhere{self->fallback, args, flags, names};
  std::array<PyObject*, kMaxArguments> all{};
  if (!Fill(self, args, PyVectorcall_NARGS(flags), names, all.data())) return elsewhere();
  if (!self->stands_in) return CallEager(*self->call, all.data());
  const int profiled = IsProfiled();
  if (profiled != 0) return profiled < 0 ? nullptr : elsewhere();
  return CallOr(*self->call, all.data(), elsewhere);
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

PyObject* NewFilled(PyTypeObject* type, PyObject* positional, PyObject* keywords) {
  static const char* parameters[] = {"", "", "", "", "", "stands_in", nullptr};
  PyObject *object, *names, *defaults, *fallback;
  Py_ssize_t outs;
  int stands_in = 0;
  if (!PyArg_ParseTupleAndKeywords(positional, keywords, "OO!O!nO|$p:EagerFilled",
                                   const_cast<char**>(parameters), &object, &PyTuple_Type, &names,
                                   &PyTuple_Type, &defaults, &outs, &fallback, &stands_in)) {
    return nullptr;
  }
  EagerCall* call = AsEagerCall(object);
  if (call == nullptr) return nullptr;
  if (PyTuple_GET_SIZE(names) != call->count || PyTuple_GET_SIZE(defaults) != call->count ||
      outs < 0 || outs > call->count - 2) {
    return RefuseDescription("wrong number of names, defaults or results");
  }
  for (Py_ssize_t i = 0; i < call->count; ++i) {
    if (!PyUnicode_CheckExact(PyTuple_GET_ITEM(names, i))) {
      return RefuseDescription("a name is no str");
    }
  }
  auto* self = reinterpret_cast<EagerFilled*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->vectorcall = CallFilled;
  self->call = call;
  self->names = Py_NewRef(names);
  self->defaults = Py_NewRef(defaults);
  self->outs = outs;
  self->fallback = Py_NewRef(fallback);
  self->stands_in = stands_in != 0;
  Py_INCREF(object);
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

}  // namespace

PyObject* MakeEagerIntoType() { return PyType_FromSpec(&into_spec); }

PyObject* MakeEagerFilledType() { return PyType_FromSpec(&filled_spec); }

}  // namespace tiercel::python
