// SPDX-License-Identifier: Apache-2.0
// tiercel._C.Direct: an eager call of an operator, from plain tensors to the launch, without Python
// in between. Whatever is not the plain case goes on to a Python function that knows them all.
#include "python/bindings/direct.h"

#include <structmember.h>

#include "python/bindings/eager.h"
#include "python/bindings/launcher.h"

namespace tiercel::python {
namespace {

// An operator's own; lives as long as the process.
struct Direct {
  PyObject_HEAD vectorcallfunc vectorcall;
  Py_ssize_t count;     // of the operator's arguments, the last one is `backend`
  Py_ssize_t tensors;   // how many come first
  Py_ssize_t passed;    // how many `run` takes: all, or all but `backend`
  PyObject* mutated;    // places of the arguments that are written to, a tuple
  Py_ssize_t matrix;    // the first of them, or 0: whose columns a call may ask for
  PyObject* ready;      // set of devices that sm90 runs on
  PyObject* overrides;  // dict whose "overriding" says that a backend was asked for elsewhere
  PyObject* run;        // sm90
  PyObject* recover;    // (error, backend, arguments) -> outputs, or raises
  PyObject* otherwise;  // (*arguments) -> outputs: everything that is not the plain case
  PyObject* increment_version;
  PyObject* name_overriding;
  PyObject* name_sm90;
};

// 1 for yes, 0 for no, -1 with a Python exception.
int TakesSm90(const Direct* self, PyObject* const* args, const TensorView* first) {
  PyObject* backend = args[self->count - 1];
  if (backend == Py_None) {
    PyObject* overriding = PyDict_GetItemWithError(self->overrides, self->name_overriding);
    if (overriding == nullptr) return PyErr_Occurred() ? -1 : 0;
    if (overriding != Py_False) return 0;
  } else if (backend != self->name_sm90) {
    if (!PyUnicode_Check(backend)) return 0;
    const int differs = PyUnicode_Compare(backend, self->name_sm90);
    if (differs != 0) return PyErr_Occurred() ? -1 : 0;
  }
  const bool on_gpu = first != nullptr && first->device_type == DeviceType::kCUDA;
  PyObject* device = on_gpu ? PyLong_FromLong(first->device_index) : DeviceOf(args[0]);
  if (device == nullptr) return -1;
  const int ready = PySet_Contains(self->ready, device);
  Py_DECREF(device);
  return ready;
}

PyObject* ArgumentTuple(PyObject* const* args, Py_ssize_t count) {
  PyObject* tuple = PyTuple_New(count);
  if (tuple == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    Py_INCREF(args[i]);
    PyTuple_SET_ITEM(tuple, i, args[i]);
  }
  return tuple;
}

// What Python's `except Exception as error: return recover(...)` does.
PyObject* Recover(const Direct* self, PyObject* const* args) {
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

bool CountAsWritten(const Direct* self, PyObject* const* args) {
  const Py_ssize_t count = PyTuple_GET_SIZE(self->mutated);
  PyObject* written = PyTuple_New(count);
  if (written == nullptr) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* tensor = args[PyLong_AsSsize_t(PyTuple_GET_ITEM(self->mutated, i))];
    Py_INCREF(tensor);
    PyTuple_SET_ITEM(written, i, tensor);
  }
  PyObject* none = PyObject_CallOneArg(self->increment_version, written);
  Py_DECREF(written);
  Py_XDECREF(none);
  return none != nullptr;
}

bool HasColumns(const TensorView* matrix, PyObject* columns) {
  if (matrix == nullptr || matrix->ndim != 2 || !PyLong_CheckExact(columns)) return false;
  const long long wanted = PyLong_AsLongLong(columns);
  if (wanted == -1) PyErr_Clear();
  return matrix->shape[1] == wanted;
}

// With one argument more, the columns of `matrix`: NotImplemented where it has others, or where
// this is not the plain case.
PyObject* Call(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  const auto* self = reinterpret_cast<const Direct*>(object);
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  const bool counted = count == self->count + 1;
  if ((count != self->count && !counted) || names != nullptr) {
    return PyObject_Vectorcall(self->otherwise, args, flags, names);
  }
  PyObject* outputs;
  {
    Route route;
    TensorsOfCall read;
    if (!FindRoute(args, self->tensors, &read, &route)) return nullptr;
    const int plain = route == Route::kDirect ? TakesSm90(self, args, read.view(0)) : 0;
    if (plain < 0) return nullptr;
    if (counted && (plain == 0 || !HasColumns(read.view(self->matrix), args[self->count]))) {
      Py_RETURN_NOTIMPLEMENTED;
    }
    if (plain == 0) return PyObject_Vectorcall(self->otherwise, args, flags, names);
    // Other callables may be someone's who changes tensors.
    if (PyCFunction_Check(self->run) || IsLauncher(self->run)) read.Use();
    outputs = PyObject_Vectorcall(self->run, args, self->passed, nullptr);
  }
  if (outputs == nullptr) outputs = Recover(self, args);
  if (outputs == nullptr) return nullptr;
  if (PyTuple_GET_SIZE(self->mutated) > 0 && !CountAsWritten(self, args)) Py_CLEAR(outputs);
  return outputs;
}

PyObject* New(PyTypeObject* type, PyObject* positional, PyObject* keywords) {
  static const char* names[] = {
      "count",   "tensors",   "mutated",           "ready",           "overrides", "run",
      "recover", "otherwise", "increment_version", "without_backend", nullptr};
  Py_ssize_t count, tensors;
  PyObject *mutated, *ready, *overrides, *run, *recover, *otherwise, *increment_version;
  int without_backend;
  if (!PyArg_ParseTupleAndKeywords(positional, keywords, "$nnO!O!O!OOOOp:Direct",
                                   const_cast<char**>(names), &count, &tensors, &PyTuple_Type,
                                   &mutated, &PySet_Type, &ready, &PyDict_Type, &overrides, &run,
                                   &recover, &otherwise, &increment_version, &without_backend)) {
    return nullptr;
  }
  if (tensors < 1 || tensors >= count) {
    PyErr_SetString(PyExc_ValueError, "Direct: tensors come first, `backend` last");
    return nullptr;
  }
  auto* self = reinterpret_cast<Direct*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->vectorcall = Call;
  self->count = count;
  self->tensors = tensors;
  self->passed = without_backend ? count - 1 : count;
  self->matrix = PyTuple_GET_SIZE(mutated) > 0 ? PyLong_AsSsize_t(PyTuple_GET_ITEM(mutated, 0)) : 0;
  const auto keep = [](PyObject* object) {
    Py_INCREF(object);
    return object;
  };
  self->mutated = keep(mutated);
  self->ready = keep(ready);
  self->overrides = keep(overrides);
  self->run = keep(run);
  self->recover = keep(recover);
  self->otherwise = keep(otherwise);
  self->increment_version = keep(increment_version);
  self->name_overriding = PyUnicode_InternFromString("overriding");
  self->name_sm90 = PyUnicode_InternFromString("sm90");
  return reinterpret_cast<PyObject*>(self);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Direct, vectorcall), READONLY, nullptr},
    {"run", T_OBJECT_EX, offsetof(Direct, run), 0, "sm90's function."},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(New)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, members},
    {Py_tp_doc, const_cast<char*>("An operator's eager call, see tiercel._op.")},
    {0, nullptr},
};

PyType_Spec spec = {"tiercel._C.Direct", sizeof(Direct), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};

}  // namespace

PyObject* MakeDirectType() { return PyType_FromSpec(&spec); }

}  // namespace tiercel::python
