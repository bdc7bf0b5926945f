// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/fp8/fp8.h"
#include "kernels/sm90/driver.h"
#include "python/bindings/call.h"
#include "python/bindings/families.h"
#include "python/bindings/numbers.h"
#include "python/bindings/optional_tensor.h"

namespace tiercel::python {
namespace {

// Of an H100 SXM or H200, for plans where there is no device to ask.
constexpr int kMultiprocessors = 132;

// (q, k, v, out, lse, q_descale, k_descale, v_descale, workspace, left, right, scale, softcap);
// from lse to workspace, each may be None. Of packed sequences, then (cu_seqlens_q, cu_seqlens_k,
// max_seqlen_q, max_seqlen_k).
struct Fp8Call {
  PythonTensor q, k, v, out, starts_q, starts_k;
  OptionalTensor lse, q_descale, k_descale, v_descale, workspace;
  AttentionFp8Call call{};
  AttentionOptions options;

  bool Parse(PyObject* const* values, Py_ssize_t count, bool packed) {
    const char* name = packed ? "attention_varlen" : "attention";
    if (!Arguments(name, values, count).Expect(packed ? 17 : 13)) return false;
    if (!q.Read(values[0], name, "q") || !k.Read(values[1], name, "k") ||
        !v.Read(values[2], name, "v") || !out.Read(values[3], name, "out") ||
        !lse.Read(values[4], name, "lse") || !q_descale.Read(values[5], name, "q_descale") ||
        !k_descale.Read(values[6], name, "k_descale") ||
        !v_descale.Read(values[7], name, "v_descale") ||
        !workspace.Read(values[8], name, "workspace")) {
      return false;
    }
    call = {&q.view(),        &k.view(),        &v.view(),        &out.view(),     lse.view(),
            q_descale.view(), k_descale.view(), v_descale.view(), workspace.view()};
    if (!ReadInteger(values[9], &options.left) || !ReadInteger(values[10], &options.right) ||
        !ReadFloat(values[11], &options.scale) || !ReadFloat(values[12], &options.softcap)) {
      return false;
    }
    if (!packed) return true;
    if (!starts_q.Read(values[13], name, "cu_seqlens_q") ||
        !starts_k.Read(values[14], name, "cu_seqlens_k")) {
      return false;
    }
    call.starts_q = &starts_q.view();
    call.starts_k = &starts_k.view();
    return ReadInteger(values[15], &call.max_q) && ReadInteger(values[16], &call.max_k);
  }
};

template <bool kPacked>
PyObject* Fp8(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Fp8Call given;
  if (!given.Parse(values, count, kPacked)) return nullptr;
  if (given.call.workspace == nullptr) {
    PyErr_Format(PyExc_TypeError, "%s: `workspace` must be a tensor, got None", given.call.op());
    return nullptr;
  }
  return Launch(given.q,
                [&](void* stream) { return attention_fp8(given.call, given.options, stream); });
}

template <bool kPacked>
PyObject* Fp8Plan(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Fp8Call given;
  if (!given.Parse(values, count, kPacked)) return nullptr;
  int multiprocessors = 0;
  if (given.q.view().device_type != DeviceType::kCUDA ||
      !multiprocessor_count(given.q.view().device_index, &multiprocessors).ok()) {
    multiprocessors = kMultiprocessors;
  }
  AttentionFp8Plan plan{};
  const Status status = attention_fp8_plan(given.call, given.options, multiprocessors, &plan);
  if (!status.ok()) return Raise(status);
  const AttentionPlan& kernel = plan.attention;
  return Py_BuildValue("{s:s, s:i, s:i, s:i, s:I, s:I, s:I, s:L}", "kernel", kernel.kernel,
                       "tile_m", kernel.tile_m, "tile_n", kernel.tile_n, "band", kernel.band,
                       "grid", kernel.grid, "block", kernel.block, "dynamic_smem",
                       kernel.dynamic_smem, "workspace", static_cast<long long>(plan.workspace));
}

PyObject* Fp8Load(PyObject*, PyObject* device) { return Load(device, attention_fp8_load); }

template <PyObject* (*kFunction)(PyObject*, PyObject* const*, Py_ssize_t)>
PyCFunction Fast() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(kFunction));
}

PyMethodDef functions[] = {
    {"attention_fp8", Fast<Fp8<false>>(), METH_FASTCALL,
     "attention_fp8(q, k, v, out, lse, q_descale, k_descale, v_descale, workspace, left, right, "
     "scale, softcap, /)\n--\n\n"
     "Launches the kernels on the current stream; fills `out` and, unless it is None, `lse`."},
    {"attention_fp8_plan", Fast<Fp8Plan<false>>(), METH_FASTCALL,
     "attention_fp8_plan(q, k, v, out, lse, q_descale, k_descale, v_descale, workspace, left, "
     "right, scale, softcap, /)\n--\n\n"
     "Checks the arguments but `workspace`, which may be None; returns the configuration. Needs no "
     "GPU."},
    {"attention_varlen_fp8", Fast<Fp8<true>>(), METH_FASTCALL,
     "attention_varlen_fp8(q, k, v, out, lse, q_descale, k_descale, v_descale, workspace, left, "
     "right, scale, softcap, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, /)\n--\n\n"
     "As attention_fp8, of packed sequences."},
    {"attention_varlen_fp8_plan", Fast<Fp8Plan<true>>(), METH_FASTCALL,
     "attention_varlen_fp8_plan(q, k, v, out, lse, q_descale, k_descale, v_descale, workspace, "
     "left, right, scale, softcap, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
     "/)\n--\n\n"
     "As attention_fp8_plan, of packed sequences."},
    {"attention_fp8_load", Fp8Load, METH_O,
     "attention_fp8_load(device, /)\n--\n\nLoads the kernels on a CUDA device."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* AttentionFp8Functions() { return functions; }

}  // namespace tiercel::python
