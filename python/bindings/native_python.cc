// SPDX-License-Identifier: Apache-2.0
// Calls of native operators that go on to Python.
#include <array>
#include <atomic>
#include <cstring>

#include "python/bindings/native_call.h"
#include "python/bindings/reference.h"

namespace tiercel::python {
namespace {

PythonHooks* hooks = nullptr;

std::atomic<int64_t> calls_through_python{0};

// A new reference, or null with a Python exception. A tensor goes over into it.
PyObject* ObjectOf(const TorchShim& shim, const Argument& argument, StackValue* stack) {
  const StackValue* from = StackValueOf(argument, stack);
  if (from == nullptr) Py_RETURN_NONE;
  switch (argument.kind) {
    case Argument::kTensor: {
      PyObject* handle = PyCapsule_New(reinterpret_cast<void*>(*from), nullptr, nullptr);
      const Reference handles(handle == nullptr ? nullptr : Py_BuildValue("[N]", handle));
      const Reference tensors(
          handles ? PyObject_CallOneArg(hooks->tensors_of_handles, handles.get()) : nullptr);
      return tensors ? PySequence_GetItem(tensors.get(), 0) : nullptr;
    }
    case Argument::kInt:
      return PyLong_FromLongLong(static_cast<int64_t>(*from));
    case Argument::kBool:
      return PyBool_FromLong((*from & 0xFF) != 0);
    case Argument::kFloat: {
      double value;
      std::memcpy(&value, from, sizeof(value));
      return PyFloat_FromDouble(value);
    }
    case Argument::kText: {
      const char* text = nullptr;
      const auto handle = reinterpret_cast<StringHandle>(*from);
      PyObject* object = shim.torch_string_c_str(handle, &text) == 0
                             ? PyUnicode_FromString(text)
                             : PyErr_Format(PyExc_RuntimeError, "torch could not read a string");
      shim.torch_delete_string(handle);
      return object;
    }
    case Argument::kDType: {
      const auto found = hooks->dtypes.find(static_cast<int32_t>(*from));
      if (found != hooks->dtypes.end()) return Py_NewRef(found->second);
      return PyErr_Format(PyExc_TypeError, "a dtype is unknown, torch's code is %d",
                          static_cast<int>(*from));
    }
  }
  return nullptr;
}

// False with a Python exception.
bool PutResult(PyObject* tensor, StackValue* to) {
  const Reference handle(PyObject_CallOneArg(hooks->handle_of_tensor, tensor));
  void* pointer = handle ? PyCapsule_GetPointer(handle.get(), nullptr) : nullptr;
  *to = reinterpret_cast<StackValue>(pointer);
  return pointer != nullptr;
}

}  // namespace

void SetPythonHooks(PythonHooks* given) { hooks = given; }

bool HasPythonHooks() { return hooks != nullptr; }

int64_t CallsThroughPython() { return calls_through_python.load(); }

bool CallPython(const TorchShim& shim, const NativeOp& op, StackValue* stack, uint64_t results) {
  calls_through_python.fetch_add(1, std::memory_order_relaxed);
  std::array<PyObject*, kMaxArguments> objects{};
  bool good = true;
  for (size_t place = 0; place < op.arguments.size(); ++place) {
    objects[place] = ObjectOf(shim, op.arguments[place], stack);
    FreeBox(shim, op.arguments[place], stack);
    if (objects[place] == nullptr) good = false;
    if (!good && objects[place] == nullptr) objects[place] = Py_NewRef(Py_None);
  }
  Reference made;
  if (good) {
    made.Take(PyObject_Vectorcall(reinterpret_cast<PyObject*>(op.call), objects.data(),
                                  op.arguments.size(), nullptr));
  }
  for (size_t place = 0; place < op.arguments.size(); ++place) Py_DECREF(objects[place]);
  if (!made) return false;
  if (results == 0) return true;
  if (results == 1 && !PyTuple_Check(made.get())) return PutResult(made.get(), stack);
  if (!PyTuple_Check(made.get()) ||
      PyTuple_GET_SIZE(made.get()) != static_cast<Py_ssize_t>(results)) {
    PyErr_Format(PyExc_RuntimeError, "%s: expected %d results", op.name.c_str(),
                 static_cast<int>(results));
    return false;
  }
  for (uint64_t i = 0; i < results; ++i) {
    if (!PutResult(PyTuple_GET_ITEM(made.get(), static_cast<Py_ssize_t>(i)), stack + i)) {
      return false;
    }
  }
  return true;
}

std::string TakeError() {
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  const Reference text(error == nullptr ? nullptr : PyObject_Str(error));
  const char* said = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  PyErr_Clear();
  std::string kept = said != nullptr ? said : "tiercel: an exception without a text";
  PyErr_Restore(type, error, trace);
  if (IsWatchedCall()) {
    CarryError();
  } else {
    PyErr_Clear();
  }
  return kept;
}

}  // namespace tiercel::python
