// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/decode_attention.h"
#include "kernels/attention/decode_kernels.h"
#include "kernels/attention/merge_attention_states.h"
#include "kernels/sm90/driver.h"
#include "python/bindings/call.h"
#include "python/bindings/families.h"
#include "python/bindings/optional_tensor.h"

namespace tiercel::python {
namespace {

constexpr char kDecode[] = "decode_attention";
constexpr char kMerge[] = "merge_attention_states";

// Of an H100 SXM or H200, for plans where there is no device to ask.
constexpr int kMultiprocessors = 132;

bool ReadInteger(PyObject* object, int64_t* value) {
  *value = PyLong_AsLongLong(object);
  return !(*value == -1 && PyErr_Occurred());
}

bool ReadFloat(PyObject* object, double* value) {
  *value = PyFloat_AsDouble(object);
  return !(*value == -1.0 && PyErr_Occurred());
}

// (q, k_cache, v_cache, page_table, seqused_k, out; prefix, k_scale, v_scale, lse, workspace, each
// or None; left, right, scale, softcap, max_keys, split).
struct DecodeCall {
  PythonTensor q, k_cache, v_cache, page_table, seqused_k, out;
  OptionalTensor prefix, k_scale, v_scale, lse, workspace;
  DecodeOptions options;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    Arguments arguments(kDecode, values, count);
    int64_t split = 0;
    if (!arguments.Expect(17) || !arguments.NextTensor("q", &q) ||
        !arguments.NextTensor("k_cache", &k_cache) || !arguments.NextTensor("v_cache", &v_cache) ||
        !arguments.NextTensor("page_table", &page_table) ||
        !arguments.NextTensor("seqused_k", &seqused_k) || !arguments.NextTensor("out", &out) ||
        !prefix.Read(values[6], kDecode, "prefix") ||
        !k_scale.Read(values[7], kDecode, "k_scale") ||
        !v_scale.Read(values[8], kDecode, "v_scale") || !lse.Read(values[9], kDecode, "lse") ||
        !workspace.Read(values[10], kDecode, "workspace") ||
        !ReadInteger(values[11], &options.left) || !ReadInteger(values[12], &options.right) ||
        !ReadFloat(values[13], &options.scale) || !ReadFloat(values[14], &options.softcap) ||
        !ReadInteger(values[15], &options.max_keys) || !ReadInteger(values[16], &split)) {
      return false;
    }
    options.split = split < -1 || split > 1024 ? 1024 : static_cast<int>(split);
    return true;
  }
  DecodeTensors tensors() const {
    return {q.view(),         k_cache.view(), v_cache.view(),  page_table.view(),
            seqused_k.view(), out.view(),     prefix.view(),   k_scale.view(),
            v_scale.view(),   lse.view(),     workspace.view()};
  }
};

// Zero when launched; otherwise the floats of workspace that it needs first.
PyObject* Decode(PyObject*, PyObject* const* values, Py_ssize_t count) {
  DecodeCall call;
  if (!call.Parse(values, count)) return nullptr;
  int64_t needed = 0;
  PyObject* launched = Launch(call.q, [&](void* stream) {
    return decode_attention(call.tensors(), call.options, stream, &needed);
  });
  if (launched == nullptr) return nullptr;
  Py_DECREF(launched);
  return PyLong_FromLongLong(needed);
}

PyObject* DecodePlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  DecodeCall call;
  if (!call.Parse(values, count)) return nullptr;
  int multiprocessors = 0;
  if (call.q.view().device_type != DeviceType::kCUDA ||
      !multiprocessor_count(call.q.view().device_index, &multiprocessors).ok()) {
    multiprocessors = kMultiprocessors;
  }
  DecodePlan plan{};
  const Status status = decode_attention_plan(call.tensors(), call.options, multiprocessors, &plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:s, s:i, s:i, s:i, s:I, s:I, s:L}", "kernel", plan.kernel, "combine",
                       plan.combine, "rows", plan.rows, "step", plan.step, "cluster", plan.cluster,
                       "grid", plan.grid, "block", plan.block, "workspace",
                       static_cast<long long>(plan.workspace));
}

Status LoadDecode(int device) {
  for (const auto table : {decode_kernels_bf16, decode_kernels_bf16_fp8, decode_kernels_fp16,
                           decode_kernels_fp16_fp8}) {
    int count = 0;
    const DecodeKernel* kernels = table(&count);
    for (int i = 0; i < count; ++i) TIERCEL_RETURN_IF_ERROR(kernels[i].kernel.load(device));
  }
  int count = 0;
  const DecodeCombineKernel* kernels = decode_combine_kernels(&count);
  for (int i = 0; i < count; ++i) TIERCEL_RETURN_IF_ERROR(kernels[i].kernel.load(device));
  return Status();
}

PyObject* DecodeLoad(PyObject*, PyObject* device) { return Load(device, LoadDecode); }

// (out_a, lse_a, out_b, lse_b, out, lse).
struct MergeCall {
  PythonTensor out_a, lse_a, out_b, lse_b, out, lse;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    Arguments arguments(kMerge, values, count);
    return arguments.Expect(6) && arguments.NextTensor("out_a", &out_a) &&
           arguments.NextTensor("lse_a", &lse_a) && arguments.NextTensor("out_b", &out_b) &&
           arguments.NextTensor("lse_b", &lse_b) && arguments.NextTensor("out", &out) &&
           arguments.NextTensor("lse", &lse);
  }
  MergeTensors tensors() const {
    return {out_a.view(), lse_a.view(), out_b.view(), lse_b.view(), out.view(), lse.view()};
  }
};

PyObject* Merge(PyObject*, PyObject* const* values, Py_ssize_t count) {
  MergeCall call;
  if (!call.Parse(values, count)) return nullptr;
  return Launch(call.out_a,
                [&](void* stream) { return merge_attention_states(call.tensors(), stream); });
}

PyObject* MergePlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  MergeCall call;
  if (!call.Parse(values, count)) return nullptr;
  MergePlan plan{};
  const Status status = merge_attention_states_plan(call.tensors(), &plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:I, s:I}", "kernel", plan.kernel, "grid", plan.grid, "block",
                       plan.block);
}

Status LoadMerge(int device) {
  int count = 0;
  const MergeKernel* kernels = merge_kernels(&count);
  for (int i = 0; i < count; ++i) TIERCEL_RETURN_IF_ERROR(kernels[i].kernel.load(device));
  return Status();
}

PyObject* MergeLoad(PyObject*, PyObject* device) { return Load(device, LoadMerge); }

PyMethodDef functions[] = {
    {"decode_attention", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Decode)),
     METH_FASTCALL,
     "decode_attention(q, k_cache, v_cache, page_table, seqused_k, out, prefix, k_scale, v_scale, "
     "lse, workspace, left, right, scale, softcap, max_keys, split, /)\n--\n\n"
     "Launches the kernels on the current stream, fills `out` and, unless it is None, `lse`, and "
     "returns 0. If it needs a workspace and got None, launches nothing and returns its length in "
     "floats."},
    {"decode_attention_plan",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(DecodePlanOf)), METH_FASTCALL,
     "decode_attention_plan(q, k_cache, v_cache, page_table, seqused_k, out, prefix, k_scale, "
     "v_scale, lse, workspace, left, right, scale, softcap, max_keys, split, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"decode_attention_load", DecodeLoad, METH_O,
     "decode_attention_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."},
    {"merge_attention_states", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Merge)),
     METH_FASTCALL,
     "merge_attention_states(out_a, lse_a, out_b, lse_b, out, lse, /)\n--\n\n"
     "Launches the kernel on the current stream; fills `out` and `lse`."},
    {"merge_attention_states_plan",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(MergePlanOf)), METH_FASTCALL,
     "merge_attention_states_plan(out_a, lse_a, out_b, lse_b, out, lse, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"merge_attention_states_load", MergeLoad, METH_O,
     "merge_attention_states_load(device, /)\n--\n\n"
     "Loads the kernels on a CUDA device, by its index."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* DecodeFunctions() { return functions; }

}  // namespace tiercel::python
