// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/backward/backward.h"
#include "kernels/sm90/driver.h"
#include "python/bindings/call.h"
#include "python/bindings/families.h"
#include "python/bindings/numbers.h"
#include "python/bindings/optional_tensor.h"

namespace tiercel::python {
namespace {

constexpr char kName[] = "attention_backward";

// Of an H100 SXM or H200, for plans where there is no device to ask.
constexpr int kMultiprocessors = 132;

// (grad, q, k, v, out, lse, grad_lse or None, dq, dk, dv, workspace or None, left, right, scale,
// softcap, deterministic).
struct BackwardCall {
  PythonTensor grad, q, k, v, out, lse, dq, dk, dv;
  OptionalTensor grad_lse, workspace;
  AttentionBackwardCall call{};
  AttentionOptions options;
  bool deterministic = false;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    if (!Arguments(kName, values, count).Expect(16)) return false;
    if (!grad.Read(values[0], kName, "grad") || !q.Read(values[1], kName, "q") ||
        !k.Read(values[2], kName, "k") || !v.Read(values[3], kName, "v") ||
        !out.Read(values[4], kName, "out") || !lse.Read(values[5], kName, "lse") ||
        !grad_lse.Read(values[6], kName, "grad_lse") || !dq.Read(values[7], kName, "dq") ||
        !dk.Read(values[8], kName, "dk") || !dv.Read(values[9], kName, "dv") ||
        !workspace.Read(values[10], kName, "workspace")) {
      return false;
    }
    call = {&grad.view(),    &q.view(),  &k.view(),  &v.view(),  &out.view(),     &lse.view(),
            grad_lse.view(), &dq.view(), &dk.view(), &dv.view(), workspace.view()};
    if (!ReadInteger(values[11], &options.left) || !ReadInteger(values[12], &options.right) ||
        !ReadFloat(values[13], &options.scale) || !ReadFloat(values[14], &options.softcap)) {
      return false;
    }
    const int truth = PyObject_IsTrue(values[15]);
    deterministic = truth == 1;
    return truth >= 0;
  }
};

PyObject* Backward(PyObject*, PyObject* const* values, Py_ssize_t count) {
  BackwardCall given;
  if (!given.Parse(values, count)) return nullptr;
  if (given.call.workspace == nullptr) {
    PyErr_SetString(PyExc_TypeError, "attention_backward: `workspace` must be a tensor, got None");
    return nullptr;
  }
  return Launch(given.q, [&](void* stream) {
    return attention_backward(given.call, given.options, given.deterministic, stream);
  });
}

PyObject* BackwardPlan(PyObject*, PyObject* const* values, Py_ssize_t count) {
  BackwardCall given;
  if (!given.Parse(values, count)) return nullptr;
  int multiprocessors = 0;
  if (given.q.view().device_type != DeviceType::kCUDA ||
      !multiprocessor_count(given.q.view().device_index, &multiprocessors).ok()) {
    multiprocessors = kMultiprocessors;
  }
  AttentionBackwardPlan plan{};
  const Status status = attention_backward_plan(given.call, given.options, given.deterministic,
                                                multiprocessors, &plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:i, s:i, s:i, s:O, s:I, s:I, s:I, s:L}", "kernel", plan.kernel,
                       "tile_m", plan.tile_m, "tile_n", plan.tile_n, "band", plan.band,
                       "descending", plan.descending ? Py_True : Py_False, "grid", plan.grid,
                       "block", plan.block, "dynamic_smem", plan.dynamic_smem, "workspace",
                       static_cast<long long>(plan.workspace));
}

PyObject* BackwardLoad(PyObject*, PyObject* device) {
  return Load(device, attention_backward_load);
}

PyMethodDef functions[] = {
    {"attention_backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Backward)),
     METH_FASTCALL,
     "attention_backward(grad, q, k, v, out, lse, grad_lse, dq, dk, dv, workspace, left, right, "
     "scale, softcap, deterministic, /)\n--\n\n"
     "Launches the kernels on the current stream; fills `dq`, `dk` and `dv`."},
    {"attention_backward_plan",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(BackwardPlan)), METH_FASTCALL,
     "attention_backward_plan(grad, q, k, v, out, lse, grad_lse, dq, dk, dv, workspace, left, "
     "right, scale, softcap, deterministic, /)\n--\n\n"
     "Checks the arguments but `workspace`, which may be None; returns the configuration. Needs no "
     "GPU."},
    {"attention_backward_load", BackwardLoad, METH_O,
     "attention_backward_load(device, /)\n--\n\nLoads the kernels on a CUDA device."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* AttentionBackwardFunctions() { return functions; }

}  // namespace tiercel::python
