// SPDX-License-Identifier: Apache-2.0
// Operators as functions of torch's dispatcher that need no Python: what an EagerCall does, for
// calls from C++. A call that is not plain goes on to the EagerCall itself, with the GIL.
//
// torch's interface has no place for data beside a function, so each operator has a function of
// its own, which is one number in a template.
#include "python/bindings/native_op.h"

#include <array>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "python/bindings/eager_rules.h"
#include "python/bindings/functions.h"
#include "python/bindings/native_call.h"
#include "python/bindings/native_launch.h"
#include "python/bindings/reference.h"
#include "python/bindings/torch_shim.h"

namespace tiercel::python {
namespace {

constexpr size_t kMostOps = 224;

std::array<NativeOp*, kMostOps> registered{};
size_t registered_count = 0;

template <size_t kIndex>
void Boxed(StackValue* stack, uint64_t, uint64_t results) {
  RunNativeOp(*registered[kIndex], stack, results);
}

template <size_t... kIndices>
constexpr std::array<BoxedFunction, sizeof...(kIndices)> AllBoxed(
    std::index_sequence<kIndices...>) {
  return {Boxed<kIndices>...};
}
constexpr auto kBoxed = AllBoxed(std::make_index_sequence<kMostOps>());

// False where it has no counterpart in C++.
bool ReadConstant(PyObject* object, Constant* constant) {
  NativeValue& value = constant->value;
  if (object == Py_None) {
    value.kind = NativeValue::kNone;
  } else if (PyBool_Check(object) || PyLong_CheckExact(object)) {
    value.kind = PyBool_Check(object) ? NativeValue::kBool : NativeValue::kInt;
    value.number = PyLong_AsLongLong(object);
  } else if (PyFloat_CheckExact(object)) {
    value.kind = NativeValue::kFloat;
    value.real = PyFloat_AS_DOUBLE(object);
  } else if (const char* text = PyUnicode_Check(object) ? PyUnicode_AsUTF8(object) : nullptr) {
    value.kind = NativeValue::kText;
    constant->text = text;
  } else {
    return false;
  }
  return !PyErr_Occurred();
}

// -1 for null or where torch has none.
int32_t CodeOfObject(PyObject* dtype) {
  const Reference text(dtype == nullptr ? nullptr : PyObject_Str(dtype));
  const char* name = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  constexpr char kPrefix[] = "torch.";
  if (name == nullptr || std::strncmp(name, kPrefix, sizeof(kPrefix) - 1) != 0) return -1;
  return TorchCodeOf(name + sizeof(kPrefix) - 1);
}

// Why a value of this kind does not go to that field; null if it does.
const char* WhyNot(const Argument& argument, FieldKind field) {
  switch (argument.kind) {
    case Argument::kTensor:
      return field == FieldKind::kTensor ? nullptr : "a tensor is read in Python";
    case Argument::kInt:
      return field == FieldKind::kOther || field == FieldKind::kTensor ? "an int is read in Python"
                                                                       : nullptr;
    case Argument::kFloat:
      return field == FieldKind::kFloat32 || field == FieldKind::kFloat64
                 ? nullptr
                 : "a float is read in Python";
    case Argument::kBool:
      return field == FieldKind::kBool ? nullptr : "a bool is read in Python";
    case Argument::kDType:
    case Argument::kText:
      break;
  }
  return "a text or dtype is read in Python";
}

// Why it cannot be called without Python; null if it can. The slots follow from the EagerCall's.
const char* ReadSlots(NativeOp* op) {
  const EagerCall& call = *op->call;
  if (call.native == Py_None) return "Python launches";
  op->native = call.native;
  op->launch = NativeLaunchFor(call.native);
  if (call.returns) return "the launch allocates the results";
  if (op->launch == nullptr) return "the launch needs more than its arguments";
  const auto count = static_cast<size_t>(call.slot_count);
  if (count < op->launch->required || count > op->launch->count) return "arguments are missing";
  for (size_t i = 0; i < count; ++i) {
    const Slot& slot = call.slots[i];
    const FieldKind field = op->launch->rules[i].kind;
    NativeSlot to{slot.kind, slot.index, {}, {}};
    if (slot.kind == Slot::kArgument) {
      if (const char* why = WhyNot(op->arguments[slot.index], field)) return why;
    } else if (slot.kind == Slot::kConstant) {
      Constant constant;
      if (!ReadConstant(slot.value, &constant)) return "a constant is read in Python";
      if (constant.value.kind == NativeValue::kText) return "a constant is read in Python";
      if (field == FieldKind::kOther) return "a constant is read in Python";
      to.constant = constant.value;
    } else if (slot.kind == Slot::kLookup) {
      PyObject *key, *value;
      for (Py_ssize_t at = 0; PyDict_Next(slot.value, &at, &key, &value);) {
        Constant from, constant;
        if (!ReadConstant(key, &from) || !ReadConstant(value, &constant) ||
            constant.value.kind == NativeValue::kText) {
          return "a table is read in Python";
        }
        to.table.emplace_back(std::move(from), constant.value);
      }
      for (auto& entry : to.table) {  // the strings have their places now
        if (entry.first.value.kind == NativeValue::kText) {
          entry.first.value.text = entry.first.text.c_str();
        }
      }
    }
    op->slots.push_back(std::move(to));
  }
  for (Py_ssize_t i = 0; i < call.output_count; ++i) {
    const Output& output = call.outputs[i];
    const OutputDTypes codes{CodeOfObject(output.dtype), CodeOfObject(output.other_dtype),
                             CodeOfObject(output.unwanted), CodeOfObject(output.instead)};
    if (output.dtype == nullptr) {
      const Argument& dtype = op->arguments[output.dtype_place];
      if (dtype.kind != Argument::kTensor && dtype.kind != Argument::kDType) {
        return "a result's dtype is no argument's";
      }
      if (dtype.optional) return "a result's dtype may be absent";
    }
    op->outputs.push_back(codes);
  }
  return nullptr;
}

// (kind, whether it may be None, its place on the stack) of each argument, `backend` last. False
// with a Python exception.
bool ReadArguments(PyObject* items, NativeOp* op) {
  static constexpr const char* kKinds[] = {"Tensor", "int", "float", "bool", "ScalarType", "str"};
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); ++i) {
    const char* name = nullptr;
    int optional = 0;
    Py_ssize_t index = 0;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(items, i), "spn", &name, &optional, &index)) {
      return false;
    }
    size_t kind = 0;
    while (kind < std::size(kKinds) && std::strcmp(kKinds[kind], name) != 0) ++kind;
    if (kind == std::size(kKinds) || index < 0 || index >= PyTuple_GET_SIZE(items)) {
      PyErr_Format(PyExc_ValueError, "register_native: no argument is a %s at place %zd", name,
                   index);
      return false;
    }
    op->arguments.push_back(
        {static_cast<Argument::Kind>(kind), optional != 0, static_cast<size_t>(index)});
  }
  if (PyTuple_GET_SIZE(items) != op->call->count || op->arguments.back().kind != Argument::kText) {
    PyErr_SetString(PyExc_ValueError, "register_native: the arguments are not the EagerCall's");
    return false;
  }
  return true;
}

// Null where torch refuses.
LibraryHandle LibraryFor(const TorchShim& shim, const std::string& ns, const char* key) {
  static auto* const libraries = new std::map<std::pair<std::string, std::string>, LibraryHandle>;
  LibraryHandle& library = (*libraries)[{ns, key}];
  if (library == nullptr) {
    shim.aoti_torch_library_init_impl(ns.c_str(), key, "tiercel", 0, &library);
  }
  return library;
}

// False with a Python exception.
bool Register(const TorchShim& shim, const std::string& ns, const char* key,
              std::unique_ptr<NativeOp> op) {
  if (registered_count == kMostOps) {
    PyErr_SetString(PyExc_RuntimeError, "register_native: too many operators");
    return false;
  }
  const LibraryHandle library = LibraryFor(shim, ns, key);
  const BoxedFunction function = kBoxed[registered_count];
  const std::string name = op->name;
  registered[registered_count++] = op.release();  // torch keeps the function
  if (library != nullptr &&
      shim.torch_library_impl(library, name.c_str(), function, kShimVersion) == 0) {
    return true;
  }
  PyErr_Format(PyExc_RuntimeError, "register_native: torch refuses %s for %s", name.c_str(), key);
  return false;
}

PyObject* RegisterNative(PyObject*, PyObject* args, PyObject* keywords) {
  static const char* names[] = {"ns",        "name",     "below", "autograd",
                                "arguments", "emulated", nullptr};
  const char *ns = nullptr, *name = nullptr;
  PyObject *below = nullptr, *autograd = nullptr, *arguments = nullptr;
  int emulated = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "ssOOO!|$p:register_native",
                                   const_cast<char**>(names), &ns, &name, &below, &autograd,
                                   &PyTuple_Type, &arguments, &emulated)) {
    return nullptr;
  }
  const TorchShim* shim = FindTorchShim();
  PyObject* const calls[] = {below, autograd};
  for (const bool of_autograd : {false, true}) {
    if (!IsEagerCall(calls[of_autograd])) return nullptr;
    auto op = std::make_unique<NativeOp>();
    op->name = name;
    op->call = reinterpret_cast<EagerCall*>(Py_NewRef(calls[of_autograd]));
    op->autograd = of_autograd;
    op->emulated = emulated != 0;
    if (!ReadArguments(arguments, op.get())) return nullptr;
    if (const char* why = ReadSlots(op.get())) {
      return PyErr_Occurred() ? nullptr : PyUnicode_FromString(why);
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(op->call->mutated); ++i) {
      op->mutated.push_back(PyLong_AsSsize_t(PyTuple_GET_ITEM(op->call->mutated, i)));
    }
    if (shim == nullptr || !HasPythonHooks()) continue;
    if (of_autograd && shim->any_modes_set == nullptr) continue;
    if (!emulated && shim->aoti_torch_get_current_cuda_stream == nullptr) continue;
    const std::string backend = emulated ? "CPU" : "CUDA";
    const std::string key = of_autograd ? "Autograd" + backend : backend;
    if (!Register(*shim, ns, key.c_str(), std::move(op))) return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* SetNativeHooks(PyObject*, PyObject* args) {
  PyObject *tensors_of_handles, *handle_of_tensor, *dtypes;
  if (!PyArg_ParseTuple(args, "OOO!:set_native_hooks", &tensors_of_handles, &handle_of_tensor,
                        &PyTuple_Type, &dtypes)) {
    return nullptr;
  }
  auto made = std::make_unique<PythonHooks>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dtypes); ++i) {
    PyObject* dtype = PyTuple_GET_ITEM(dtypes, i);
    const int32_t code = CodeOfObject(dtype);
    if (PyErr_Occurred()) return nullptr;
    if (code >= 0) made->dtypes.emplace(code, Py_NewRef(dtype));
  }
  made->tensors_of_handles = Py_NewRef(tensors_of_handles);
  made->handle_of_tensor = Py_NewRef(handle_of_tensor);
  SetPythonHooks(made.release());
  Py_RETURN_NONE;
}

PyObject* SetDevice(PyObject*, PyObject* args) {
  int device = 0, ready = 0;
  if (!PyArg_ParseTuple(args, "ip:set_native_device", &device, &ready)) return nullptr;
  SetNativeDevice(device, ready != 0);
  Py_RETURN_NONE;
}

PyObject* HasNativeOps(PyObject*, PyObject*) {
  const TorchShim* shim = FindTorchShim();
  return PyBool_FromLong(shim != nullptr && HasPythonHooks());
}

PyObject* CountCalls(PyObject*, PyObject*) { return PyLong_FromLongLong(CallsThroughPython()); }

PyMethodDef functions[] = {
    {"calls_through_python", CountCalls, METH_NOARGS,
     "calls_through_python()\n--\n\nHow many calls of native operators went on to Python."},
    {"register_native", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(RegisterNative)),
     METH_VARARGS | METH_KEYWORDS,
     "register_native(ns, name, below, autograd, arguments, *, emulated=False)\n--\n\n"
     "Registers an operator's EagerCalls, below autograd and before it, as functions that C++ "
     "calls "
     "without Python. Returns None, or why only Python can call it."},
    {"set_native_hooks", SetNativeHooks, METH_VARARGS,
     "set_native_hooks(tensors_of_handles, handle_of_tensor, dtypes, /)\n--\n\n"
     "How calls from C++ go on to Python, and all dtypes of torch's."},
    {"set_native_device", SetDevice, METH_VARARGS,
     "set_native_device(device, ready, /)\n--\n\n"
     "Whether calls from C++ may use a CUDA device; -1 stands for all that were named."},
    {"has_native_ops", HasNativeOps, METH_NOARGS,
     "has_native_ops()\n--\n\nWhether operators are registered for calls without Python."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* NativeOpFunctions() { return functions; }

}  // namespace tiercel::python
