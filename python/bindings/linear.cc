// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/linear_act_kernels.h"
#include "kernels/sm90/driver.h"
#include "python/bindings/call.h"
#include "python/bindings/families.h"
#include "python/bindings/tuned.h"

namespace tiercel::python {
namespace {

constexpr char kLinearAct[] = "linear_act";

// Of an H100 SXM or H200, for plans where there is no device to ask.
constexpr int kMultiprocessors = 132;

using Fields = std::array<int, 6>;

LinearActConfig ConfigOf(const Fields& fields) {
  return {fields[0], fields[1], fields[2] != 0, fields[3] != 0, fields[4], fields[5]};
}

// What both functions below take: (x, weight, bias or None, out, activation's index) and, from the
// tuner, a configuration.
struct LinearActCall {
  PythonTensor x, weight, bias, out;
  const TensorView* bias_view = nullptr;
  Activation activation = Activation::kNone;
  LinearActConfig given{};
  const LinearActConfig* config = nullptr;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    if (count == 6) {
      Fields fields;
      if (!ReadConfig(values[--count], kLinearAct, &fields)) return false;
      given = ConfigOf(fields);
      config = &given;
    }
    if (!Arguments(kLinearAct, values, count).Expect(5)) return false;
    if (!x.Read(values[0], kLinearAct, "x") || !weight.Read(values[1], kLinearAct, "weight") ||
        !out.Read(values[3], kLinearAct, "out")) {
      return false;
    }
    if (values[2] != Py_None) {
      if (!bias.Read(values[2], kLinearAct, "bias")) return false;
      bias_view = &bias.view();
    }
    const long index = PyLong_AsLong(values[4]);
    if (index == -1 && PyErr_Occurred()) return false;
    if (index < 0 || index > static_cast<long>(Activation::kGeluTanh)) {
      PyErr_Format(PyExc_ValueError, "%s: no activation has the index %ld", kLinearAct, index);
      return false;
    }
    activation = static_cast<Activation>(index);
    return true;
  }
};

PyObject* LinearAct(PyObject*, PyObject* const* values, Py_ssize_t count) {
  LinearActCall call;
  if (!call.Parse(values, count)) return nullptr;
  PyObject* result = Launch(call.x, [&](void* stream) {
    return linear_act(call.x.view(), call.weight.view(), call.bias_view, call.out.view(),
                      call.activation, call.config, stream);
  });
  if (result != nullptr) HintOnce(linear_act_tuned(), kLinearAct);
  return result;
}

PyObject* LinearActPlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  LinearActCall call;
  if (!call.Parse(values, count)) return nullptr;
  int multiprocessors = 0;
  if (call.x.view().device_type != DeviceType::kCUDA ||
      !multiprocessor_count(call.x.view().device_index, &multiprocessors).ok()) {
    multiprocessors = kMultiprocessors;
  }
  LinearActPlan plan{};
  const Status status =
      linear_act_plan(call.x.view(), call.weight.view(), call.bias_view, call.out.view(),
                      call.activation, multiprocessors, call.config, &plan);
  if (!status.ok()) return Raise(status);
  HintOnce(linear_act_tuned(), kLinearAct);
  return Py_BuildValue("{s:s, s:i, s:i, s:O, s:i, s:i, s:i, s:i, s:I, s:I, s:I}", "kernel",
                       plan.kernel, "tile_m", plan.tile_m, "tile_n", plan.tile_n, "pingpong",
                       plan.pingpong ? Py_True : Py_False, "cluster", plan.cluster, "splits",
                       plan.splits, "group", plan.group, "rows", plan.rows, "grid", plan.grid,
                       "block", plan.block, "dynamic_smem", plan.dynamic_smem);
}

Status LoadLinearAct(int device) {
  int count = 0;
  const LinearActKernel* kernels = linear_act_kernels(&count);
  for (int i = 0; i < count; ++i) {
    TIERCEL_RETURN_IF_ERROR(kernels[i].kernel.load(device));
  }
  return Status();
}

PyObject* LinearActLoad(PyObject*, PyObject* device) { return Load(device, LoadLinearAct); }

PyObject* LinearActTuned(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return SetTuned(linear_act_tuned(), "linear_act_tuned", values, count, ConfigOf);
}

PyMethodDef functions[] = {
    {"linear_act", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(LinearAct)),
     METH_FASTCALL,
     "linear_act(x, weight, bias, out, activation, config=..., /)\n--\n\n"
     "Launches the kernel on the current stream; fills `out`. `activation` is its index."},
    {"linear_act_plan",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(LinearActPlanOf)), METH_FASTCALL,
     "linear_act_plan(x, weight, bias, out, activation, config=..., /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"linear_act_load", LinearActLoad, METH_O,
     "linear_act_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."},
    {"linear_act_tuned", AsMethod(LinearActTuned), METH_FASTCALL,
     "linear_act_tuned(device, problems, /)\n--\n\n"
     "Sets what was tuned: [(dtype, N, K, [(M, configuration)])]."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* LinearFunctions() { return functions; }

}  // namespace tiercel::python
