// SPDX-License-Identifier: Apache-2.0
#include "kernels/softmax/softmax.h"

#include "python/bindings/call.h"
#include "python/bindings/families.h"
#include "python/bindings/optional_tensor.h"

namespace tiercel::python {
namespace {

const char* OpName(bool log) { return log ? "log_softmax" : "softmax_online"; }

// The last two arguments: the factor of the scores, None for 1, and whether the logarithm is
// wanted.
bool ReadOptions(PyObject* const* values, float* scale, bool* log) {
  const int truth = PyObject_IsTrue(values[1]);
  if (truth < 0) return false;
  *log = truth == 1;
  const double number = values[0] == Py_None ? 1.0 : PyFloat_AsDouble(values[0]);
  *scale = static_cast<float>(number);
  return number != -1.0 || !PyErr_Occurred();
}

// (x, mask or None, out, scale, log).
struct Forward {
  PythonTensor x, out;
  OptionalTensor mask;
  SoftmaxCall call;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    if (!Arguments("softmax", values, count).Expect(5) ||
        !ReadOptions(values + 3, &call.scale, &call.log)) {
      return false;
    }
    const char* op = OpName(call.log);
    if (!x.Read(values[0], op, "x") || !mask.Read(values[1], op, "mask") ||
        !out.Read(values[2], op, "out")) {
      return false;
    }
    call.x = &x.view();
    call.mask = mask.view();
    call.out = &out.view();
    return true;
  }
  const PythonTensor& First() const { return x; }
  Status Run(void* stream) const { return softmax(call, stream); }
  Status Plan(SoftmaxPlan* plan) const { return softmax_plan(call, plan); }
};

// (grad, y, mask or None, x_grad, scale, log).
struct Backward {
  PythonTensor grad, y, x_grad;
  OptionalTensor mask;
  SoftmaxBackwardCall call;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    if (!Arguments("softmax_backward", values, count).Expect(6) ||
        !ReadOptions(values + 4, &call.scale, &call.log)) {
      return false;
    }
    const char* op = OpName(call.log);
    if (!grad.Read(values[0], op, "grad") || !y.Read(values[1], op, "y") ||
        !mask.Read(values[2], op, "mask") || !x_grad.Read(values[3], op, "x_grad")) {
      return false;
    }
    call.grad = &grad.view();
    call.y = &y.view();
    call.mask = mask.view();
    call.x_grad = &x_grad.view();
    return true;
  }
  const PythonTensor& First() const { return y; }
  Status Run(void* stream) const { return softmax_backward(call, stream); }
  Status Plan(SoftmaxPlan* plan) const { return softmax_backward_plan(call, plan); }
};

template <typename Call>
PyObject* PlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Call call;
  if (!call.Parse(values, count)) return nullptr;
  SoftmaxPlan plan{};
  const Status status = call.Plan(&plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:i, s:i, s:O, s:I, s:I}", "kernel", plan.kernel, "threads_per_row",
                       plan.threads_per_row, "blocks_per_row", plan.blocks_per_row, "vectors",
                       plan.vectors ? Py_True : Py_False, "grid", plan.grid, "block", plan.block);
}

PyObject* LoadSoftmax(PyObject*, PyObject* device) { return Load(device, softmax_load); }

PyMethodDef functions[] = {
    {"softmax", AsMethod(Run<Forward>), METH_FASTCALL,
     "softmax(x, mask, out, scale, log, /)\n--\n\n"
     "Launches the kernel on the current stream; fills `out`."},
    {"softmax_plan", AsMethod(PlanOf<Forward>), METH_FASTCALL,
     "softmax_plan(x, mask, out, scale, log, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"softmax_backward", AsMethod(Run<Backward>), METH_FASTCALL,
     "softmax_backward(grad, y, mask, x_grad, scale, log, /)\n--\n\n"
     "Launches the kernel on the current stream; fills `x_grad`."},
    {"softmax_backward_plan", AsMethod(PlanOf<Backward>), METH_FASTCALL,
     "softmax_backward_plan(grad, y, mask, x_grad, scale, log, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"softmax_load", LoadSoftmax, METH_O,
     "softmax_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* SoftmaxFunctions() { return functions; }

}  // namespace tiercel::python
