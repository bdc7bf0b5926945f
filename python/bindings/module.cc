// SPDX-License-Identifier: Apache-2.0
// tiercel._C: the kernels' launchers as Python functions. It includes and links nothing of torch's.
#include <pybind11/pybind11.h>

#include "kernels/sm90/driver.h"
#include "python/bindings/allocate.h"
#include "python/bindings/call.h"
#include "python/bindings/direct.h"
#include "python/bindings/eager.h"
#include "python/bindings/exchange_cache.h"
#include "python/bindings/families.h"
#include "python/bindings/jit.h"
#include "python/bindings/launcher.h"

namespace py = pybind11;

namespace tiercel::python {
namespace {

// Opening the driver is the first thing that asks for a GPU, so it happens here and not on import.
py::dict DriverInfo() {
  const Status status = driver_status();
  py::dict info;
  info["ok"] = status.ok();
  info["version"] = driver_version();
  info["message"] = status.ok() ? std::string() : status.message();
  return info;
}

py::tuple DeviceCapability(int device) {
  int major = 0, minor = 0;
  const Status status = device_capability(device, &major, &minor);
  if (!status.ok()) {
    Raise(status);
    throw py::error_already_set();
  }
  return py::make_tuple(major, minor);
}

void AddType(py::module_& module, const char* name, PyObject* type) {
  if (type == nullptr) throw py::error_already_set();
  module.add_object(name, py::reinterpret_steal<py::object>(type));
}

void AddAll(py::module_& module) {
  using Functions = PyMethodDef* (*)();
  static constexpr Functions kTables[] = {AllocateFunctions,
                                          EagerFunctions,
                                          ActivationFunctions,
                                          AttentionFunctions,
                                          AttentionBackwardFunctions,
                                          AttentionFp8Functions,
                                          DecodeFunctions,
                                          GemvFunctions,
                                          GroupedGemmFunctions,
                                          LinearFunctions,
                                          MoeFunctions,
                                          NormFunctions,
                                          QuantFunctions,
                                          ReduceFunctions,
                                          RotaryFunctions,
                                          RoutingFunctions,
                                          SoftmaxFunctions,
                                          TransposeFunctions};
  for (const Functions functions : kTables) {
    if (PyModule_AddFunctions(module.ptr(), functions()) != 0) throw py::error_already_set();
  }
  AddType(module, "Direct", MakeDirectType());
  AddType(module, "Launcher", MakeLauncherType());
  AddJit(module);
}

}  // namespace
}  // namespace tiercel::python

PYBIND11_MODULE(_C, module) {
  module.doc() = "Launchers of tiercel's precompiled kernels; private, see tiercel.ops.";
  module.def("driver_info", &tiercel::python::DriverInfo,
             "Opens the NVIDIA driver and says whether it will do, its CUDA version and why not.");
  module.def("device_capability", &tiercel::python::DeviceCapability, py::arg("device"),
             "The (major, minor) compute capability of a device.");
  module.def("_clear_exchange_cache", &tiercel::python::ClearExchangeCache);
  tiercel::python::AddAll(module);
}
