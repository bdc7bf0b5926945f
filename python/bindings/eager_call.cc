// SPDX-License-Identifier: Apache-2.0
// A call goes through three questions:
//
//   route   the tensor arguments are torch's own, nothing watches, no gradient is wanted
//   choose  sm90 applies: no other backend was asked for, and it runs on the tensors' device
//   launch  the outputs are allocated, and the native function gets its arguments
//
// Every other call goes on to a Python function that knows all cases: `fallback` if the route or
// the backend differs, `run` if only the layout does.
#include "python/bindings/eager_call.h"

#include <structmember.h>

#include "python/bindings/call.h"
#include "python/bindings/eager_outputs.h"

namespace tiercel::python {
namespace {

// Set by set_overriding: true if a backend was asked for outside of the call.
bool overriding = false;

// The type of EagerCall, for AsEagerCall.
PyTypeObject* eager_call_type = nullptr;

// 1 for yes, 0 for no, -1 with a Python exception.
int TakesSm90(const EagerCall& call, const Arguments& arguments) {
  PyObject* backend = arguments[call.count - 1];
  if (backend == Py_None) {
    if (overriding) return 0;
  } else if (backend != call.name_sm90) {
    if (!PyUnicode_Check(backend)) return 0;
    const int differs = PyUnicode_Compare(backend, call.name_sm90);
    if (differs != 0) return PyErr_Occurred() ? -1 : 0;
  }
  const Py_ssize_t place = call.layout.tensors.items[0];
  const TensorView* first = arguments.view(place);
  const bool on_gpu = first != nullptr && first->device_type == DeviceType::kCUDA;
  const Reference device(on_gpu ? PyLong_FromLong(first->device_index)
                                : DeviceOf(arguments[place]));
  return device ? PySet_Contains(call.ready, device.get()) : -1;
}

PyObject* TupleOf(PyObject* const* values, Py_ssize_t count) {
  PyObject* tuple = PyTuple_New(count);
  if (tuple == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(tuple, i, Py_NewRef(values[i]));
  return tuple;
}

// A borrowed reference; null also where the table has nothing for the argument.
PyObject* LookUp(PyObject* table, PyObject* key) {
  // Others may not be hashable.
  if (key != Py_None && !PyUnicode_CheckExact(key) && !PyLong_CheckExact(key)) return nullptr;
  return PyDict_GetItemWithError(table, key);
}

PyObject* ReleaseAsTuple(Outputs* outputs, Py_ssize_t count) {
  PyObject* tuple = PyTuple_New(count);
  if (tuple == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(tuple, i, (*outputs)[i].Release());
  return tuple;
}

// The operator's result: None, a tensor, or a tuple of them.
PyObject* Release(Outputs* outputs, Py_ssize_t count) {
  if (count == 0) Py_RETURN_NONE;
  return count == 1 ? (*outputs)[0].Release() : ReleaseAsTuple(outputs, count);
}

// The outputs, after the launch. Null without a Python exception where nothing was done.
PyObject* Launch(const EagerCall& call, const Arguments& arguments) {
  if (UnfitTensor(call.layout, arguments) >= 0) return nullptr;
  Outputs outputs;
  if (!MakeOutputs(call, arguments, &outputs)) return nullptr;
  std::array<PyObject*, decltype(call.slots)::kMost> values;
  Py_ssize_t count = 0;
  for (const Slot& slot : call.slots) {
    PyObject* value = slot.kind == Slot::kArgument ? arguments[slot.index]
                      : slot.kind == Slot::kOutput ? outputs[slot.index].get()
                      : slot.kind == Slot::kLookup ? LookUp(slot.value, arguments[slot.index])
                                                   : slot.value;
    if (value == nullptr) return nullptr;
    values[count++] = value;
  }
  Reference launched(PyObject_Vectorcall(call.native, values.data(), count, nullptr));
  if (!launched) return nullptr;
  return call.returns ? launched.Release() : Release(&outputs, call.outputs.count);
}

// Python's `except Exception as error: return recover(...)`.
PyObject* Recover(const EagerCall& call, PyObject* const* args) {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  const Reference owned_type(type), owned_error(error), owned_trace(trace);
  if (trace != nullptr) PyException_SetTraceback(error, trace);
  const Reference arguments(TupleOf(args, call.count));
  if (!arguments) return nullptr;
  return PyObject_CallFunctionObjArgs(call.recover, error, args[call.count - 1], arguments.get(),
                                      nullptr);
}

bool CountAsWritten(const EagerCall& call, PyObject* const* args) {
  std::array<PyObject*, kMaxTensors> given;
  Py_ssize_t count = 0;
  for (const Py_ssize_t place : call.mutated) {
    if (args[place] != Py_None) given[count++] = args[place];
  }
  const Reference written(TupleOf(given.data(), count));
  if (!written) return false;
  const Reference none(PyObject_CallOneArg(call.increment_version, written.get()));
  return static_cast<bool>(none);
}

// outputs(*arguments): the outputs that a launch would fill, or None where only Python can make
// them.
PyObject* OutputsOf(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  const auto& call = *reinterpret_cast<const EagerCall*>(object);
  if (count != call.count || call.outputs.count == 0) Py_RETURN_NONE;
  Route route;
  Arguments arguments(call, args);
  if (!arguments.FindRoute(&route)) return nullptr;
  if (route != Route::kDirect) Py_RETURN_NONE;
  Outputs outputs;
  if (!MakeOutputs(call, arguments, &outputs)) {
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  }
  return ReleaseAsTuple(&outputs, call.outputs.count);
}

PyObject* SetOverriding(PyObject*, PyObject* value) {
  const int truth = PyObject_IsTrue(value);
  if (truth < 0) return nullptr;
  overriding = truth != 0;
  Py_RETURN_NONE;
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(EagerCall, vectorcall), READONLY, nullptr},
    {"run", T_OBJECT_EX, offsetof(EagerCall, run), 0, "sm90 in Python."},
    {"native", T_OBJECT, offsetof(EagerCall, native), 0, "sm90's function, or None for `run`."},
    {nullptr, 0, 0, 0, nullptr},
};

PyMethodDef methods[] = {
    {"outputs", AsMethod(OutputsOf), METH_FASTCALL,
     "outputs(*arguments)\n--\n\nThe outputs that a launch would fill, or None where only Python "
     "can make them."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot type_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(NewEagerCall)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, members},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>("An operator's eager call, see tiercel.core.op.")},
    {0, nullptr},
};

PyType_Spec type_spec = {"tiercel._C.EagerCall", sizeof(EagerCall), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, type_slots};

PyMethodDef functions[] = {
    {"set_overriding", SetOverriding, METH_O,
     "set_overriding(value, /)\n--\n\nWhether a backend was asked for outside of the call."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyObject* CallOr(const EagerCall& call, PyObject* const* args, const Elsewhere& elsewhere) {
  PyObject* outputs = nullptr;
  {
    Route route;
    Arguments arguments(call, args);
    if (!arguments.FindRoute(&route)) return nullptr;
    const int chosen = route == Route::kDirect ? TakesSm90(call, arguments) : 0;
    if (chosen < 0) return nullptr;
    if (chosen == 0) return elsewhere();
    if (call.native != Py_None) {
      arguments.Use();
      outputs = Launch(call, arguments);
    }
  }
  // Python may change tensors, so what was read of them is no longer in use here.
  if (outputs == nullptr && !PyErr_Occurred()) {
    outputs = PyObject_Vectorcall(call.run, args, call.count, nullptr);
  }
  if (outputs == nullptr) outputs = Recover(call, args);
  if (outputs == nullptr) return nullptr;
  if (call.mutated.count > 0 && !CountAsWritten(call, args)) Py_CLEAR(outputs);
  return outputs;
}

PyObject* CallEager(const EagerCall& call, PyObject* const* args) {
  return CallOr(call, args, {call.fallback, args, static_cast<size_t>(call.count), nullptr});
}

PyObject* VectorcallEager(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  const auto& call = *reinterpret_cast<const EagerCall*>(object);
  const Elsewhere elsewhere{call.fallback, args, flags, names};
  if (PyVectorcall_NARGS(flags) != call.count || names != nullptr) return elsewhere();
  return CallOr(call, args, elsewhere);
}

EagerCall* AsEagerCall(PyObject* object) {
  if (Py_TYPE(object) == eager_call_type) return reinterpret_cast<EagerCall*>(object);
  PyErr_SetString(PyExc_TypeError, "the call must be an EagerCall");
  return nullptr;
}

PyObject* MakeEagerCallType() {
  PyObject* type = PyType_FromSpec(&type_spec);
  eager_call_type = reinterpret_cast<PyTypeObject*>(Py_XNewRef(type));
  return type;
}

PyMethodDef* EagerCallFunctions() { return functions; }

}  // namespace tiercel::python
