// SPDX-License-Identifier: Apache-2.0
#include "kernels/activation/activation.h"

#include "python/bindings/call.h"
#include "python/bindings/families.h"
#include "python/bindings/optional_tensor.h"

namespace tiercel::python {
namespace {

// The last two arguments: the function's index and whether it is gated.
bool ReadForm(PyObject* const* values, ActivationFunction* function, bool* gated) {
  const long index = PyLong_AsLong(values[0]);
  if (index == -1 && PyErr_Occurred()) return false;
  if (index < 0 || index > static_cast<long>(ActivationFunction::kRelu)) {
    PyErr_Format(PyExc_ValueError, "activation: no function has the index %ld", index);
    return false;
  }
  *function = static_cast<ActivationFunction>(index);
  const int truth = PyObject_IsTrue(values[1]);
  *gated = truth == 1;
  return truth >= 0;
}

// (x, up or None, scale or None, out, function, gated).
struct Forward {
  static constexpr char kSignature[] = "activation";
  PythonTensor x, out;
  OptionalTensor up, scale;
  ActivationCall call;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    if (!Arguments(kSignature, values, count).Expect(6) ||
        !ReadForm(values + 4, &call.function, &call.gated)) {
      return false;
    }
    const char* op = activation_op_name(call.function, call.gated);
    if (!x.Read(values[0], op, "x") || !up.Read(values[1], op, "up") ||
        !scale.Read(values[2], op, "scale") || !out.Read(values[3], op, "out")) {
      return false;
    }
    call.x = &x.view();
    call.up = up.view();
    call.scale = scale.view();
    call.out = &out.view();
    return true;
  }
  const PythonTensor& First() const { return x; }
  Status Run(void* stream) const { return activation(call, stream); }
  Status Plan(ActivationPlan* plan) const { return activation_plan(call, plan); }
};

// (grad, x, up or None, x_grad, up_grad or None, function, gated).
struct Backward {
  static constexpr char kSignature[] = "activation_backward";
  PythonTensor grad, x, x_grad;
  OptionalTensor up, up_grad;
  ActivationBackwardCall call;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    if (!Arguments(kSignature, values, count).Expect(7) ||
        !ReadForm(values + 5, &call.function, &call.gated)) {
      return false;
    }
    const char* op = activation_op_name(call.function, call.gated);
    if (!grad.Read(values[0], op, "grad") || !x.Read(values[1], op, "x") ||
        !up.Read(values[2], op, "up") || !x_grad.Read(values[3], op, "x_grad") ||
        !up_grad.Read(values[4], op, "up_grad")) {
      return false;
    }
    if ((up.view() == nullptr) != (up_grad.view() == nullptr)) {
      PyErr_Format(PyExc_ValueError, "%s: `up` and `up_grad` must come together", op);
      return false;
    }
    call.grad = &grad.view();
    call.x = &x.view();
    call.up = up.view();
    call.x_grad = &x_grad.view();
    call.up_grad = up_grad.view();
    return true;
  }
  const PythonTensor& First() const { return x; }
  Status Run(void* stream) const { return activation_backward(call, stream); }
  Status Plan(ActivationPlan* plan) const { return activation_backward_plan(call, plan); }
};

template <typename Call>
PyObject* PlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Call call;
  if (!call.Parse(values, count)) return nullptr;
  ActivationPlan plan{};
  const Status status = call.Plan(&plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:L, s:L, s:O, s:I, s:I}", "kernel", plan.kernel, "rows",
                       static_cast<long long>(plan.rows), "columns",
                       static_cast<long long>(plan.columns), "aligned",
                       plan.aligned ? Py_True : Py_False, "grid", plan.grid, "block", plan.block);
}

// (device, function, gated).
PyObject* LoadFunction(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ActivationFunction function;
  bool gated;
  if (!Arguments("activation_load", values, count).Expect(3) ||
      !ReadForm(values + 1, &function, &gated)) {
    return nullptr;
  }
  const long device = PyLong_AsLong(values[0]);
  if (device == -1 && PyErr_Occurred()) return nullptr;
  const Status status =
      WithoutGil([&] { return activation_load(function, gated, static_cast<int>(device)); });
  if (!status.ok()) return Raise(status);
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"activation", AsMethod(Run<Forward>), METH_FASTCALL,
     "activation(x, up, scale, out, function, gated, /)\n--\n\n"
     "Launches the kernel on the current stream; fills `out`. `function` is its index."},
    {"activation_plan", AsMethod(PlanOf<Forward>), METH_FASTCALL,
     "activation_plan(x, up, scale, out, function, gated, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"activation_backward", AsMethod(Run<Backward>), METH_FASTCALL,
     "activation_backward(grad, x, up, x_grad, up_grad, function, gated, /)\n--\n\n"
     "Launches the kernel on the current stream; fills `x_grad` and `up_grad`."},
    {"activation_backward_plan", AsMethod(PlanOf<Backward>), METH_FASTCALL,
     "activation_backward_plan(grad, x, up, x_grad, up_grad, function, gated, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"activation_load", AsMethod(LoadFunction), METH_FASTCALL,
     "activation_load(device, function, gated, /)\n--\n\n"
     "Loads a function's kernels on a CUDA device, by its index."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* ActivationFunctions() { return functions; }

}  // namespace tiercel::python
