// SPDX-License-Identifier: Apache-2.0
// tiercel._C: the kernels' launchers as Python functions. It includes and links nothing of torch's.
#include <Python.h>

#include "kernels/sm90/driver.h"
#include "python/bindings/allocate.h"
#include "python/bindings/call.h"
#include "python/bindings/eager.h"
#include "python/bindings/eager_call.h"
#include "python/bindings/exchange_cache.h"
#include "python/bindings/functions.h"
#include "python/bindings/invariant.h"
#include "python/bindings/jit.h"
#include "python/bindings/native_op.h"
#include "python/bindings/reference.h"

namespace tiercel::python {
namespace {

// Opening the driver is the first thing that asks for a GPU, so it happens here and not on import.
PyObject* DriverInfo(PyObject*, PyObject*) {
  int version = 0;
  const Status status = WithoutGil([&] {  // to start the driver may take seconds
    const Status found = driver_status();
    version = driver_version();
    return found;
  });
  return Py_BuildValue("{sNsiss}", "ok", PyBool_FromLong(status.ok()), "version", version,
                       "message", status.message().c_str());
}

PyObject* DeviceCapability(PyObject*, PyObject* args, PyObject* keywords) {
  static const char* const kNames[] = {"device", nullptr};
  int device = 0, major = 0, minor = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "i", const_cast<char**>(kNames), &device)) {
    return nullptr;
  }
  const Status status = WithoutGil([&] { return device_capability(device, &major, &minor); });
  return status.ok() ? Py_BuildValue("(ii)", major, minor) : Raise(status);
}

// Types, hooks and caches are the process's, so one interpreter alone may have them.
bool IsMainInterpreter() { return PyInterpreterState_Get() == PyInterpreterState_Main(); }

PyObject* ClearCache(PyObject*, PyObject*) {
  ClearExchangeCache();
  Py_RETURN_NONE;
}

PyObject* Stub(PyObject*, PyObject*) { return PyUnicode_FromString(StubOfFamilies().c_str()); }

PyObject* ClaimTorchOps(PyObject*, PyObject*) {
  static constexpr char kPython[] = "Python";
  const char* owner = ClaimOps(kPython);
  if (owner == nullptr || owner == kPython) Py_RETURN_NONE;
  PyErr_Format(PyExc_RuntimeError,
               "tiercel: the ops of this process are registered already, from %s "
               "(tiercel_register_torch_ops); use torch.ops.tiercel, or import tiercel in another "
               "process",
               owner);
  return nullptr;
}

PyObject* HasNative(PyObject*, PyObject* name) {
  const char* text = PyUnicode_AsUTF8(name);
  return text == nullptr ? nullptr : PyBool_FromLong(FindNative(text) != nullptr);
}

PyObject* NativeOpNames(PyObject*, PyObject*) {
  const std::vector<NativeOp>& ops = NativeOps();
  PyObject* names = PyTuple_New(static_cast<Py_ssize_t>(ops.size()));
  for (size_t i = 0; names != nullptr && i < ops.size(); ++i) {
    PyObject* name = PyUnicode_FromString(ops[i].name.c_str());
    if (name == nullptr) Py_CLEAR(names);
    if (name != nullptr) PyTuple_SET_ITEM(names, static_cast<Py_ssize_t>(i), name);
  }
  return names;
}

PyMethodDef functions[] = {
    {"claim_torch_ops", ClaimTorchOps, METH_NOARGS,
     "claim_torch_ops()\n--\n\nRaises if the ops of this process are registered from C++."},
    {"has_native", HasNative, METH_O,
     "has_native(name, /)\n--\n\nWhether this function has a form without Python."},
    {"native_ops", NativeOpNames, METH_NOARGS,
     "native_ops()\n--\n\nThe names of the ops that run without Python."},
    {"driver_info", DriverInfo, METH_NOARGS,
     "driver_info()\n--\n\nOpens the NVIDIA driver and says whether it will do, its CUDA version "
     "and why not."},
    {"device_capability",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(DeviceCapability)),
     METH_VARARGS | METH_KEYWORDS,
     "device_capability(device)\n--\n\nThe (major, minor) compute capability of a device."},
    {"_clear_exchange_cache", ClearCache, METH_NOARGS, "_clear_exchange_cache()\n--\n\n"},
    {"_stub", Stub, METH_NOARGS,
     "_stub()\n--\n\nThe declarations of the families' functions, for _C.pyi."},
    {nullptr, nullptr, 0, nullptr},
};

constexpr char kOtherInterpreter[] = "tiercel._C does not support loading in subinterpreters";

bool AddType(PyObject* module, const char* name, PyObject* made) {
  const Reference type(made);
  return type && PyModule_AddObjectRef(module, name, type.get()) == 0;
}

bool AddAll(PyObject* module) {
  for (PyMethodDef* all : {functions, AllocateFunctions(), EagerFunctions(), EagerCallFunctions(),
                           InvariantFunctions(), JitFunctions()}) {
    if (PyModule_AddFunctions(module, all) != 0) return false;
  }
  return AddFamilies(module) == 0 && AddType(module, "EagerCall", MakeEagerCallType()) &&
         AddType(module, "EagerInto", MakeEagerIntoType()) &&
         AddType(module, "EagerFilled", MakeEagerFilledType()) &&
         AddType(module, "JitKernel", MakeJitKernelType());
}

// The module, once it is whole. There is one in a process: who imports it again, by whichever name
// or loader, gets the same.
PyObject* whole = nullptr;

PyObject* Create(PyObject* spec, PyModuleDef*) {
  if (whole != nullptr && IsMainInterpreter()) return Py_NewRef(whole);
  const Reference name(PyObject_GetAttrString(spec, "name"));
  return name ? PyModule_NewObject(name.get()) : nullptr;
}

int Execute(PyObject* module) {
  // Python 3.13 calls PyInit__C in the main interpreter, whichever imports.
  if (!IsMainInterpreter()) {
    PyErr_SetString(PyExc_ImportError, kOtherInterpreter);
    return -1;
  }
  if (module == whole) return 0;
  if (!AddAll(module)) return -1;
  whole = Py_NewRef(module);
  return 0;
}

PyModuleDef_Slot slots[] = {
    {Py_mod_create, reinterpret_cast<void*>(Create)},
    {Py_mod_exec, reinterpret_cast<void*>(Execute)},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "_C",
    "Launchers of tiercel's precompiled kernels; private, see tiercel.ops.",
    0,
    nullptr,
    slots,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace
}  // namespace tiercel::python

PyMODINIT_FUNC PyInit__C() {
  if (tiercel::python::IsMainInterpreter()) {
    return PyModuleDef_Init(&tiercel::python::definition);
  }
  PyErr_SetString(PyExc_ImportError, tiercel::python::kOtherInterpreter);
  return nullptr;
}
