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

bool ParseActivation(PyObject* value, const char* op, Activation* activation) {
  const long index = PyLong_AsLong(value);
  if (index == -1 && PyErr_Occurred()) return false;
  if (index < 0 || index > static_cast<long>(Activation::kGeluTanh)) {
    PyErr_Format(PyExc_ValueError, "%s: no activation has the index %ld", op, index);
    return false;
  }
  *activation = static_cast<Activation>(index);
  return true;
}

bool ParseOptional(PyObject* value, const char* op, const char* name, PythonTensor* tensor,
                   const TensorView** view) {
  if (value == Py_None) return true;
  if (!tensor->Read(value, op, name)) return false;
  *view = &tensor->view();
  return true;
}

PyObject* PlanOf(const LinearActPlan& plan) {
  return Py_BuildValue("{s:s, s:i, s:i, s:O, s:i, s:i, s:i, s:i, s:I, s:I, s:I}", "kernel",
                       plan.kernel, "tile_m", plan.tile_m, "tile_n", plan.tile_n, "pingpong",
                       plan.pingpong ? Py_True : Py_False, "cluster", plan.cluster, "splits",
                       plan.splits, "group", plan.group, "rows", plan.rows, "grid", plan.grid,
                       "block", plan.block, "dynamic_smem", plan.dynamic_smem);
}

int MultiprocessorsOf(const TensorView& tensor) {
  int count = 0;
  const bool found = tensor.device_type == DeviceType::kCUDA &&
                     multiprocessor_count(tensor.device_index, &count).ok();
  return found ? count : kMultiprocessors;
}

// (x, weight, bias or None, out, activation's index) and, from the tuner, a configuration; with
// `extra` (x, weight, bias or None, residual or None, out, sums or None, activation's index).
template <bool extra, bool gated>
struct LinearActArguments {
  PythonTensor x, weight, bias, residual, out, sums;
  LinearActConfig given{};
  LinearActCall call;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    const char* op = gated ? "gated_linear" : kLinearAct;
    if (!extra && !gated && count == 6) {
      Fields fields;
      if (!ReadConfig(values[--count], op, &fields)) return false;
      given = ConfigOf(fields);
      call.config = &given;
    }
    if (!::tiercel::python::Arguments(op, values, count).Expect(extra ? 7 : 5)) return false;
    PyObject* const* rest = values + 3;
    if (!x.Read(values[0], op, "x") || !weight.Read(values[1], op, "weight") ||
        !ParseOptional(values[2], op, "bias", &bias, &call.bias) ||
        (extra && !ParseOptional(*rest++, op, "residual", &residual, &call.residual)) ||
        !out.Read(*rest++, op, "out") ||
        (extra && !ParseOptional(*rest++, op, "sums", &sums, &call.sums)) ||
        !ParseActivation(*rest, op, &call.activation)) {
      return false;
    }
    call.x = &x.view();
    call.w = &weight.view();
    call.y = &out.view();
    call.gated = gated;
    return true;
  }

  const PythonTensor& First() const { return x; }
  Status Run(void* stream) const { return linear_act(call, stream); }
  Status Plan(LinearActPlan* plan) const {
    return linear_act_plan(call, MultiprocessorsOf(x.view()), plan);
  }
};

using LinearActPlain = LinearActArguments<false, false>;
using LinearActExtra = LinearActArguments<true, false>;
using GatedLinear = LinearActArguments<false, true>;

// (x, weight, x_scale, weight_scale, bias or None, out, activation's index)
struct Fp8LinearArguments {
  PythonTensor x, weight, x_scale, weight_scale, bias, out;
  LinearActCall call;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    const char* op = "fp8_linear";
    if (!Arguments(op, values, count).Expect(7)) return false;
    if (!x.Read(values[0], op, "x") || !weight.Read(values[1], op, "weight") ||
        !x_scale.Read(values[2], op, "x_scale") ||
        !weight_scale.Read(values[3], op, "weight_scale") ||
        !ParseOptional(values[4], op, "bias", &bias, &call.bias) ||
        !out.Read(values[5], op, "out") || !ParseActivation(values[6], op, &call.activation)) {
      return false;
    }
    call.x = &x.view();
    call.w = &weight.view();
    call.x_scale = &x_scale.view();
    call.w_scale = &weight_scale.view();
    call.y = &out.view();
    return true;
  }

  const PythonTensor& First() const { return x; }
  Status Run(void* stream) const { return linear_act(call, stream); }
  Status Plan(LinearActPlan* plan) const {
    return linear_act_plan(call, MultiprocessorsOf(x.view()), plan);
  }
};

// (grad, weight or x, out, whether it is the weight's gradient)
struct LinearGradientArguments {
  PythonTensor grad, other, out;
  LinearGradientCall call;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    const char* op = "linear_act_grad";
    bool of_weight = false;
    Arguments arguments(op, values, count);
    if (!arguments.Expect(4) || !arguments.NextTensor("grad", &grad) ||
        !arguments.NextTensor("other", &other) || !arguments.NextTensor("out", &out) ||
        !arguments.NextBool("of_weight", &of_weight)) {
      return false;
    }
    call.of = of_weight ? LinearGradient::kWeight : LinearGradient::kX;
    call.grad = &grad.view();
    call.other = &other.view();
    call.out = &out.view();
    return true;
  }

  const PythonTensor& First() const { return grad; }
  Status Run(void* stream) const { return linear_gradient(call, stream); }
  Status Plan(LinearActPlan* plan) const {
    return linear_gradient_plan(call, MultiprocessorsOf(grad.view()), plan);
  }
};

template <typename Call>
PyObject* Plan(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Call call;
  if (!call.Parse(values, count)) return nullptr;
  LinearActPlan plan{};
  const Status status = call.Plan(&plan);
  return status.ok() ? PlanOf(plan) : Raise(status);
}

PyObject* LinearAct(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  PyObject* result = Run<LinearActPlain>(self, values, count);
  if (result != nullptr) HintOnce(linear_act_tuned(), kLinearAct);
  return result;
}

PyObject* LinearActPlanOf(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  PyObject* result = Plan<LinearActPlain>(self, values, count);
  if (result != nullptr) HintOnce(linear_act_tuned(), kLinearAct);
  return result;
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
    {"linear_act", AsMethod(LinearAct), METH_FASTCALL,
     "linear_act(x, weight, bias, out, activation, config=..., /)\n--\n\n"
     "Launches the kernel on the current stream; fills `out`. `activation` is its index."},
    {"linear_act_plan", AsMethod(LinearActPlanOf), METH_FASTCALL,
     "linear_act_plan(x, weight, bias, out, activation, config=..., /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"linear_act_extra", AsMethod(Run<LinearActExtra>), METH_FASTCALL,
     "linear_act_extra(x, weight, bias, residual, out, sums, activation, /)\n--\n\n"
     "Adds `residual` to the result; fills `sums` with what the activation is taken of."},
    {"linear_act_extra_plan", AsMethod(Plan<LinearActExtra>), METH_FASTCALL,
     "linear_act_extra_plan(x, weight, bias, residual, out, sums, activation, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"gated_linear", AsMethod(Run<GatedLinear>), METH_FASTCALL,
     "gated_linear(x, weight, bias, out, activation, /)\n--\n\n"
     "Launches the kernel on the current stream; fills `out`. `activation` is its index."},
    {"gated_linear_plan", AsMethod(Plan<GatedLinear>), METH_FASTCALL,
     "gated_linear_plan(x, weight, bias, out, activation, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"fp8_linear", AsMethod(Run<Fp8LinearArguments>), METH_FASTCALL,
     "fp8_linear(x, weight, x_scale, weight_scale, bias, out, activation, /)\n--\n\n"
     "Launches the kernel on the current stream; fills `out`. `activation` is its index."},
    {"fp8_linear_plan", AsMethod(Plan<Fp8LinearArguments>), METH_FASTCALL,
     "fp8_linear_plan(x, weight, x_scale, weight_scale, bias, out, activation, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"linear_act_grad", AsMethod(Run<LinearGradientArguments>), METH_FASTCALL,
     "linear_act_grad(grad, other, out, of_weight, /)\n--\n\n"
     "The backward's product: grad @ weight, or grad.T @ x `of_weight`; fills `out`."},
    {"linear_act_grad_plan", AsMethod(Plan<LinearGradientArguments>), METH_FASTCALL,
     "linear_act_grad_plan(grad, other, out, of_weight, /)\n--\n\n"
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
