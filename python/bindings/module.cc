// SPDX-License-Identifier: Apache-2.0
// tiercel._C: the kernels' launchers as Python functions. It includes and links nothing of torch's.
#include <pybind11/pybind11.h>

#include "kernels/sm90/driver.h"
#include "python/bindings/allocate.h"
#include "python/bindings/call.h"
#include "python/bindings/eager.h"
#include "python/bindings/eager_call.h"
#include "python/bindings/exchange_cache.h"
#include "python/bindings/functions.h"
#include "python/bindings/jit.h"

namespace py = pybind11;

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

PyMethodDef functions[] = {
    {"driver_info", DriverInfo, METH_NOARGS,
     "driver_info()\n--\n\nOpens the NVIDIA driver and says whether it will do, its CUDA version "
     "and why not."},
    {"device_capability",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(DeviceCapability)),
     METH_VARARGS | METH_KEYWORDS,
     "device_capability(device)\n--\n\nThe (major, minor) compute capability of a device."},
    {"_clear_exchange_cache", ClearCache, METH_NOARGS, nullptr},
    {"_stub", Stub, METH_NOARGS, "The declarations of the families' functions, for _C.pyi."},
    {nullptr, nullptr, 0, nullptr},
};

constexpr char kOtherInterpreter[] = "tiercel._C does not support loading in subinterpreters";

void AddType(py::module_& module, const char* name, PyObject* type) {
  if (type == nullptr) throw py::error_already_set();
  module.add_object(name, py::reinterpret_steal<py::object>(type));
}

void AddAll(py::module_& module) {
  for (PyMethodDef* all :
       {functions, AllocateFunctions(), EagerFunctions(), EagerCallFunctions(), JitFunctions()}) {
    if (PyModule_AddFunctions(module.ptr(), all) != 0) throw py::error_already_set();
  }
  if (AddFamilies(module.ptr()) != 0) throw py::error_already_set();
  AddType(module, "EagerCall", MakeEagerCallType());
  AddType(module, "EagerInto", MakeEagerIntoType());
  AddType(module, "EagerFilled", MakeEagerFilledType());
  AddType(module, "JitKernel", MakeJitKernelType());
}

}  // namespace
}  // namespace tiercel::python

// pybind11's own initialisation would wait for ever in a subinterpreter of Python 3.10 or 3.11, so
// it is a function that PyInit__C calls.
#define PyInit__C InitModule
PYBIND11_MODULE(_C, module) {
  // Python 3.13 calls PyInit__C in the main interpreter, whichever imports.
  if (!tiercel::python::IsMainInterpreter()) {
    throw py::import_error(tiercel::python::kOtherInterpreter);
  }
  module.doc() = "Launchers of tiercel's precompiled kernels; private, see tiercel.ops.";
  tiercel::python::AddAll(module);
}
#undef PyInit__C

extern "C" PYBIND11_EXPORT PyObject* PyInit__C() {
  if (tiercel::python::IsMainInterpreter()) return InitModule();
  PyErr_SetString(PyExc_ImportError, tiercel::python::kOtherInterpreter);
  return nullptr;
}
