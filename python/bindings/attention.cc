// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/forward/forward.h"
#include "kernels/attention/forward/kernels.h"
#include "kernels/sm90/driver.h"
#include "python/bindings/call.h"
#include "python/bindings/families.h"
#include "python/bindings/numbers.h"

namespace tiercel::python {
namespace {

constexpr char kAttention[] = "attention";
constexpr char kVarlen[] = "attention_varlen";

// Of an H100 SXM or H200, for plans where there is no device to ask.
constexpr int kMultiprocessors = 132;

// What both functions below take: (q, k, v, out, lse or None, left, right, scale, softcap).
struct AttentionCall {
  PythonTensor q, k, v, out, lse;
  const TensorView* lse_view = nullptr;
  AttentionOptions options;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    if (!Arguments(kAttention, values, count).Expect(9)) return false;
    if (!q.Read(values[0], kAttention, "q") || !k.Read(values[1], kAttention, "k") ||
        !v.Read(values[2], kAttention, "v") || !out.Read(values[3], kAttention, "out")) {
      return false;
    }
    if (values[4] != Py_None) {
      if (!lse.Read(values[4], kAttention, "lse")) return false;
      lse_view = &lse.view();
    }
    return ReadInteger(values[5], &options.left) && ReadInteger(values[6], &options.right) &&
           ReadFloat(values[7], &options.scale) && ReadFloat(values[8], &options.softcap);
  }
};

int Multiprocessors(const PythonTensor& q) {
  int count = 0;
  const bool known = q.view().device_type == DeviceType::kCUDA &&
                     multiprocessor_count(q.view().device_index, &count).ok();
  return known ? count : kMultiprocessors;
}

PyObject* PlanOf(const Status& status, const AttentionPlan& plan) {
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:i, s:i, s:i, s:I, s:I, s:I}", "kernel", plan.kernel, "tile_m",
                       plan.tile_m, "tile_n", plan.tile_n, "band", plan.band, "grid", plan.grid,
                       "block", plan.block, "dynamic_smem", plan.dynamic_smem);
}

PyObject* Attention(PyObject*, PyObject* const* values, Py_ssize_t count) {
  AttentionCall call;
  if (!call.Parse(values, count)) return nullptr;
  return Launch(call.q, [&](void* stream) {
    return attention(call.q.view(), call.k.view(), call.v.view(), call.out.view(), call.lse_view,
                     call.options, stream);
  });
}

PyObject* AttentionPlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  AttentionCall call;
  if (!call.Parse(values, count)) return nullptr;
  AttentionPlan plan{};
  const Status status = attention_plan(call.q.view(), call.k.view(), call.v.view(), call.out.view(),
                                       call.lse_view, call.options, Multiprocessors(call.q), &plan);
  return PlanOf(status, plan);
}

// (q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse or None, max_q, max_k, left, right, scale,
// softcap).
struct VarlenCall {
  PythonTensor q, k, v, starts_q, starts_k, out, lse;
  PackedAttention packed{};
  AttentionOptions options;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    if (!Arguments(kVarlen, values, count).Expect(13)) return false;
    if (!q.Read(values[0], kVarlen, "q") || !k.Read(values[1], kVarlen, "k") ||
        !v.Read(values[2], kVarlen, "v") || !starts_q.Read(values[3], kVarlen, "cu_seqlens_q") ||
        !starts_k.Read(values[4], kVarlen, "cu_seqlens_k") ||
        !out.Read(values[5], kVarlen, "out")) {
      return false;
    }
    packed = {&q.view(),        &k.view(), &v.view(), &out.view(), nullptr, &starts_q.view(),
              &starts_k.view(), 0,         0};
    if (values[6] != Py_None) {
      if (!lse.Read(values[6], kVarlen, "lse")) return false;
      packed.lse = &lse.view();
    }
    return ReadInteger(values[7], &packed.max_q) && ReadInteger(values[8], &packed.max_k) &&
           ReadInteger(values[9], &options.left) && ReadInteger(values[10], &options.right) &&
           ReadFloat(values[11], &options.scale) && ReadFloat(values[12], &options.softcap);
  }
};

PyObject* Varlen(PyObject*, PyObject* const* values, Py_ssize_t count) {
  VarlenCall call;
  if (!call.Parse(values, count)) return nullptr;
  return Launch(call.q,
                [&](void* stream) { return attention_varlen(call.packed, call.options, stream); });
}

PyObject* VarlenPlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  VarlenCall call;
  if (!call.Parse(values, count)) return nullptr;
  AttentionPlan plan{};
  const Status status =
      attention_varlen_plan(call.packed, call.options, Multiprocessors(call.q), &plan);
  return PlanOf(status, plan);
}

Status LoadAttention(int device) {
  int count = 0;
  const AttentionKernel* kernels = attention_kernels(&count);
  for (int i = 0; i < count; ++i) {
    TIERCEL_RETURN_IF_ERROR(kernels[i].kernel.load(device));
  }
  return Status();
}

PyObject* AttentionLoad(PyObject*, PyObject* device) { return Load(device, LoadAttention); }

PyMethodDef functions[] = {
    {"attention", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Attention)),
     METH_FASTCALL,
     "attention(q, k, v, out, lse, left, right, scale, softcap, /)\n--\n\n"
     "Launches the kernel on the current stream; fills `out` and, unless it is None, `lse`."},
    {"attention_plan", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(AttentionPlanOf)),
     METH_FASTCALL,
     "attention_plan(q, k, v, out, lse, left, right, scale, softcap, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"attention_load", AttentionLoad, METH_O,
     "attention_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."},
    {"attention_varlen", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Varlen)),
     METH_FASTCALL,
     "attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, max_seqlen_q, "
     "max_seqlen_k, left, right, scale, softcap, /)\n--\n\n"
     "The same for sequences of several lengths behind each other."},
    {"attention_varlen_plan",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(VarlenPlanOf)), METH_FASTCALL,
     "attention_varlen_plan(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, max_seqlen_q, "
     "max_seqlen_k, left, right, scale, softcap, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* AttentionFunctions() { return functions; }

}  // namespace tiercel::python
