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
py::dict DriverInfo() {
  Status status;
  int version = 0;
  {
    const py::gil_scoped_release others_run;  // to start the driver may take seconds
    status = driver_status();
    version = driver_version();
  }
  py::dict info;
  info["ok"] = status.ok();
  info["version"] = version;
  info["message"] = status.ok() ? std::string() : status.message();
  return info;
}

py::tuple DeviceCapability(int device) {
  int major = 0, minor = 0;
  Status status;
  {
    const py::gil_scoped_release others_run;
    status = device_capability(device, &major, &minor);
  }
  if (!status.ok()) {
    Raise(status);
    throw py::error_already_set();
  }
  return py::make_tuple(major, minor);
}

// Types, hooks and caches are the process's, so one interpreter alone may have them.
bool IsMainInterpreter() { return PyInterpreterState_Get() == PyInterpreterState_Main(); }

constexpr char kOtherInterpreter[] = "tiercel._C does not support loading in subinterpreters";

void AddType(py::module_& module, const char* name, PyObject* type) {
  if (type == nullptr) throw py::error_already_set();
  module.add_object(name, py::reinterpret_steal<py::object>(type));
}

void AddAll(py::module_& module) {
  for (PyMethodDef* functions : {AllocateFunctions(), EagerFunctions(), EagerCallFunctions()}) {
    if (PyModule_AddFunctions(module.ptr(), functions) != 0) throw py::error_already_set();
  }
  if (AddFamilies(module.ptr()) != 0) throw py::error_already_set();
  AddType(module, "EagerCall", MakeEagerCallType());
  AddType(module, "EagerInto", MakeEagerIntoType());
  AddType(module, "EagerFilled", MakeEagerFilledType());
  AddJit(module);
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
  module.def("driver_info", &tiercel::python::DriverInfo,
             "Opens the NVIDIA driver and says whether it will do, its CUDA version and why not.");
  module.def("device_capability", &tiercel::python::DeviceCapability, py::arg("device"),
             "The (major, minor) compute capability of a device.");
  module.def("_clear_exchange_cache", &tiercel::python::ClearExchangeCache);
  module.def("_stub", &tiercel::python::StubOfFamilies,
             "The declarations of the families' functions, for _C.pyi.");
  tiercel::python::AddAll(module);
}
#undef PyInit__C

extern "C" PYBIND11_EXPORT PyObject* PyInit__C() {
  if (tiercel::python::IsMainInterpreter()) return InitModule();
  PyErr_SetString(PyExc_ImportError, tiercel::python::kOtherInterpreter);
  return nullptr;
}
