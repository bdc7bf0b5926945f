// SPDX-License-Identifier: Apache-2.0
#include "kernels/norm/norm.h"

#include "kernels/norm/norm_backward_config.h"
#include "kernels/norm/norm_kernels.h"
#include "python/bindings/call.h"
#include "python/bindings/families.h"
#include "python/bindings/tuned.h"

namespace tiercel::python {
namespace {

// Of an H100 SXM or H200, for plans where there is no device to ask.
constexpr int kMultiprocessors = 132;

constexpr const char* kOps[] = {"rms_norm", "layer_norm"};

const char* OpName(NormKind kind) { return kOps[static_cast<int>(kind)]; }

// Positional arguments, taken in order; each function returns false with a Python exception.
class Values {
 public:
  Values(const char* op, PyObject* const* values) : op_(op), values_(values) {}

  bool Tensor(const char* name, PythonTensor* tensor, const TensorView** view) {
    if (!tensor->Read(*values_++, op_, name)) return false;
    *view = &tensor->view();
    return true;
  }
  bool OptionalTensor(const char* name, PythonTensor* tensor, const TensorView** view) {
    *view = nullptr;
    if (*values_ != Py_None) return Tensor(name, tensor, view);
    ++values_;
    return true;
  }
  bool Float(float* value) {
    const double number = PyFloat_AsDouble(*values_++);
    *value = static_cast<float>(number);
    return number != -1.0 || !PyErr_Occurred();
  }
  bool Count(const char* name, int least, int* value) {
    const long number = PyLong_AsLong(*values_++);
    if (number == -1 && PyErr_Occurred()) return false;
    *value = static_cast<int>(number);
    if (number >= least && number <= 1'000'000) return true;
    PyErr_Format(PyExc_ValueError, "%s: `%s` must be from %d to 1000000, got %ld", op_, name, least,
                 number);
    return false;
  }

 private:
  const char* op_;
  PyObject* const* values_;
};

// (x, weight, bias, residual, out, residual_out, eps); all but x and out may be None.
struct ForwardCall {
  PythonTensor tensors[6];
  NormForward call{};

  bool Parse(NormKind kind, PyObject* const* values, Py_ssize_t count) {
    call.kind = kind;
    if (!Arguments(OpName(kind), values, count).Expect(7)) return false;
    Values next(OpName(kind), values);
    return next.Tensor("x", &tensors[0], &call.x) &&
           next.OptionalTensor("weight", &tensors[1], &call.weight) &&
           next.OptionalTensor("bias", &tensors[2], &call.bias) &&
           next.OptionalTensor("residual", &tensors[3], &call.residual) &&
           next.Tensor("out", &tensors[4], &call.out) &&
           next.OptionalTensor("residual_out", &tensors[5], &call.residual_out) &&
           next.Float(&call.eps);
  }
};

// (x, weight, grad, grad_residual, grad_x, grad_weight, grad_bias, workspace, eps); all but x, grad
// and grad_x may be None.
struct BackwardCall {
  PythonTensor tensors[8];
  NormBackward call{};

  // Takes the tuner's configuration, a tuple, from the end of the arguments.
  bool TakeConfig(NormKind kind, PyObject* const* values, Py_ssize_t* count) {
    if (*count == 0 || !PyTuple_Check(values[*count - 1])) return true;
    NormBackwardFields fields;
    if (!ReadConfig(values[--*count], OpName(kind), &fields)) return false;
    call.config = norm_backward_config_of(fields);
    return true;
  }
  bool Parse(NormKind kind, PyObject* const* values, Py_ssize_t count) {
    LoadNormBackwardRanges();
    call.kind = kind;
    if (!Arguments(OpName(kind), values, count).Expect(9)) return false;
    Values next(OpName(kind), values);
    return next.Tensor("x", &tensors[0], &call.x) &&
           next.OptionalTensor("weight", &tensors[1], &call.weight) &&
           next.Tensor("grad", &tensors[2], &call.grad) &&
           next.OptionalTensor("grad_residual", &tensors[3], &call.grad_residual) &&
           next.Tensor("grad_x", &tensors[4], &call.grad_x) &&
           next.OptionalTensor("grad_weight", &tensors[5], &call.grad_weight) &&
           next.OptionalTensor("grad_bias", &tensors[6], &call.grad_bias) &&
           next.OptionalTensor("workspace", &tensors[7], &call.workspace) && next.Float(&call.eps);
  }
};

NormDevice DeviceOf(const TensorView& view) {
  NormDevice device;
  const bool known = norm_device(view, &device).ok() && device.multiprocessors > 0;
  return known ? device : NormDevice{kMultiprocessors, 0, view.device_index};
}

PyObject* PlanDict(const NormPlan& plan) {
  return Py_BuildValue("{s:s, s:i, s:i, s:i, s:I, s:I, s:I, s:i, s:i, s:i}", "kernel", plan.kernel,
                       "vector_bytes", plan.vector_bytes, "threads_per_row", plan.threads_per_row,
                       "cluster", plan.cluster, "grid", plan.grid, "block", plan.block,
                       "dynamic_smem", plan.dynamic_smem, "stages", plan.stages, "ahead",
                       plan.ahead, "parts", plan.parts);
}

template <NormKind kKind>
PyObject* Forward(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ForwardCall call;
  if (!call.Parse(kKind, values, count)) return nullptr;
  return Launch(call.tensors[0], [&](void* stream) { return norm_forward(call.call, stream); });
}

template <NormKind kKind>
PyObject* ForwardPlan(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ForwardCall call;
  if (!call.Parse(kKind, values, count)) return nullptr;
  NormPlan plan{};
  const Status status = norm_forward_plan(call.call, DeviceOf(*call.call.x).multiprocessors, &plan);
  return status.ok() ? PlanDict(plan) : Raise(status);
}

template <NormKind kKind>
PyObject* Backward(PyObject*, PyObject* const* values, Py_ssize_t count) {
  BackwardCall call;
  if (!call.TakeConfig(kKind, values, &count) || !call.Parse(kKind, values, count)) return nullptr;
  return Launch(call.tensors[0], [&](void* stream) { return norm_backward(call.call, stream); });
}

template <NormKind kKind>
PyObject* BackwardPlan(PyObject*, PyObject* const* values, Py_ssize_t count) {
  constexpr Py_ssize_t kArguments = 9;  // a launch's; two more name another device
  BackwardCall call;
  if (!call.TakeConfig(kKind, values, &count)) return nullptr;
  const bool named = count == kArguments + 2;
  if (!call.Parse(kKind, values, named ? kArguments : count)) return nullptr;
  NormDevice device;
  if (named) {
    Values next(OpName(kKind), values + kArguments);
    if (!next.Count("multiprocessors", 1, &device.multiprocessors) ||
        !next.Count("memory_gbps", 0, &device.memory_gbps)) {
      return nullptr;
    }
  } else {
    device = DeviceOf(*call.call.x);
  }
  NormPlan plan{};
  const Status status = norm_backward_plan(call.call, device, &plan);
  return status.ok() ? PlanDict(plan) : Raise(status);
}

Status LoadNorm(int device) {
  int count = 0;
  const NormForwardKernel* forward = norm_forward_kernels(&count);
  for (int i = 0; i < count; ++i) TIERCEL_RETURN_IF_ERROR(forward[i].kernel.load(device));
  const NormBackwardKernel* backward = norm_backward_kernels(&count);
  for (int i = 0; i < count; ++i) TIERCEL_RETURN_IF_ERROR(backward[i].kernel.load(device));
  const NormReduceKernel* reduce = norm_reduce_kernels(&count);
  for (int i = 0; i < count; ++i) TIERCEL_RETURN_IF_ERROR(reduce[i].kernel.load(device));
  return Status();
}

PyObject* NormLoad(PyObject*, PyObject* device) { return Load(device, LoadNorm); }

#define TIERCEL_FAST(name, function, text) \
  {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, text}
#define TIERCEL_NORM(name, kind)                                                                 \
  TIERCEL_FAST(name, Forward<kind>,                                                              \
               name                                                                              \
               "(x, weight, bias, residual, out, residual_out, eps, /)\n--\n\n"                  \
               "Launches the kernel on the current stream; fills `out` and `residual_out`."),    \
      TIERCEL_FAST(name "_plan", ForwardPlan<kind>,                                              \
                   name                                                                          \
                   "_plan(x, weight, bias, residual, out, residual_out, eps, /)\n--\n\n"         \
                   "Checks the arguments as a launch does and returns the configuration. "       \
                   "Needs no GPU."),                                                             \
      TIERCEL_FAST(name "_backward", Backward<kind>,                                             \
                   name                                                                          \
                   "_backward(x, weight, grad, grad_residual, grad_x, grad_weight, "             \
                   "grad_bias, workspace, eps, config=..., /)\n--\n\n"                           \
                   "Launches the kernels on the current stream; fills the gradients."),          \
      TIERCEL_FAST(name "_backward_plan", BackwardPlan<kind>,                                    \
                   name                                                                          \
                   "_backward_plan(x, weight, grad, grad_residual, grad_x, grad_weight, "        \
                   "grad_bias, workspace, eps, multiprocessors=None, "                           \
                   "memory_gbps=None, config=..., /)\n--\n\n"                                    \
                   "The same checks, and the configuration, on x's device or as on one with "    \
                   "so many multiprocessors and gigabytes a second (both or neither). Needs no " \
                   "GPU.")

PyMethodDef functions[] = {
    TIERCEL_NORM("rms_norm", NormKind::kRms),
    TIERCEL_NORM("layer_norm", NormKind::kLayer),
    {"norm_load", NormLoad, METH_O,
     "norm_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* NormFunctions() { return functions; }

}  // namespace tiercel::python
