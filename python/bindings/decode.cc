// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/decode/decode.h"

#include <algorithm>
#include <cmath>

#include "kernels/attention/decode/kernels.h"
#include "kernels/attention/merge/merge.h"
#include "kernels/sm90/driver.h"
#include "python/bindings/allocate.h"
#include "python/bindings/call.h"
#include "python/bindings/families.h"
#include "python/bindings/numbers.h"
#include "python/bindings/optional_tensor.h"
#include "python/bindings/reference.h"
#include "python/bindings/workspace.h"

namespace tiercel::python {
namespace {

constexpr char kDecode[] = "decode_attention";
constexpr char kMerge[] = "merge_attention_states";

// Of an H100 SXM or H200, for plans where there is no device to ask.
constexpr int kMultiprocessors = 132;

// None or (left, right).
bool ReadWindow(PyObject* object, DecodeOptions* options) {
  options->left = options->right = -1;
  if (object == Py_None) return true;
  const Reference limits(
      PySequence_Fast(object, "decode_attention: `window` must be None or (left, right)"));
  if (!limits) return false;
  if (PySequence_Fast_GET_SIZE(limits.get()) != 2) {
    PyErr_SetString(PyExc_ValueError, "decode_attention: `window` must be None or (left, right)");
    return false;
  }
  return ReadInteger(PySequence_Fast_GET_ITEM(limits.get(), 0), &options->left) &&
         ReadInteger(PySequence_Fast_GET_ITEM(limits.get(), 1), &options->right);
}

constexpr int kInputs = 5;

struct DecodeCall {
  PythonTensor q, k_cache, v_cache, page_table, seqused_k, out;
  OptionalTensor prefix, k_scale, v_scale, lse, workspace;
  DecodeOptions options;

  bool ReadInputs(PyObject* const* values) {
    return q.Read(values[0], kDecode, "q") && k_cache.Read(values[1], kDecode, "k_cache") &&
           v_cache.Read(values[2], kDecode, "v_cache") &&
           page_table.Read(values[3], kDecode, "page_table") &&
           seqused_k.Read(values[4], kDecode, "seqused_k");
  }
  bool ReadOptional(PyObject* const* values) {
    return prefix.Read(values[0], kDecode, "prefix") &&
           k_scale.Read(values[1], kDecode, "k_scale") &&
           v_scale.Read(values[2], kDecode, "v_scale");
  }

  // (q, k_cache, v_cache, page_table, seqused_k, out; prefix, k_scale, v_scale, lse, workspace,
  // each or None; left, right, scale, softcap, max_keys, split).
  bool Parse(PyObject* const* values, Py_ssize_t count) {
    int64_t split = 0;
    if (!Arguments(kDecode, values, count).Expect(17) || !ReadInputs(values) ||
        !out.Read(values[5], kDecode, "out") || !ReadOptional(values + 6) ||
        !lse.Read(values[9], kDecode, "lse") || !workspace.Read(values[10], kDecode, "workspace") ||
        !ReadInteger(values[11], &options.left) || !ReadInteger(values[12], &options.right) ||
        !ReadFloat(values[13], &options.scale) || !ReadFloat(values[14], &options.softcap) ||
        !ReadInteger(values[15], &options.max_keys) || !ReadInteger(values[16], &split)) {
      return false;
    }
    options.split = split < -1 || split > 1024 ? 1024 : static_cast<int>(split);
    return true;
  }

  // (causal, window, scale, softcap, max_seqused_k), as the public operators take them.
  bool ReadOptions(PyObject* const* values) {
    const int causal = PyObject_IsTrue(values[0]);
    if (causal < 0 || !ReadWindow(values[1], &options)) return false;
    if (causal == 1) options.right = 0;
    const TensorView& view = q.view();
    const int64_t d = view.ndim > 0 ? view.shape[view.ndim - 1] : 1;
    options.scale = 1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(d, 1)));
    return (values[2] == Py_None || ReadFloat(values[2], &options.scale)) &&
           (values[3] == Py_None || ReadFloat(values[3], &options.softcap)) &&
           (values[4] == Py_None || ReadInteger(values[4], &options.max_keys));
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
  int64_t needed = 0;
  if (!call.Parse(values, count)) return nullptr;
  const Reference launched(Launch(call.q, [&](void* stream) {
    return decode_attention(call.tensors(), call.options, stream, &needed);
  }));
  return launched ? PyLong_FromLongLong(needed) : nullptr;
}

// A public operator as a whole: allocates what is not given, then launches. Its arguments are the
// inputs; `out` and `lse`, if given; prefix and scales; options.
template <bool kGiven, bool kLse>
PyObject* DecodeOperator(PyObject*, PyObject* const* values, Py_ssize_t count) {
  constexpr int kOutputs = !kGiven ? 0 : kLse ? 2 : 1;
  DecodeCall call;
  PyObject* const* rest = values + kInputs + kOutputs;
  if (!Arguments(kDecode, values, count).Expect(kInputs + kOutputs + 8) ||
      !call.ReadInputs(values) || !call.ReadOptional(rest) || !call.ReadOptions(rest + 3)) {
    return nullptr;
  }
  const TensorView& q = call.q.view();
  if (q.ndim != 4) {
    PyErr_Format(PyExc_ValueError, "%s: `q` must have 4 dimensions, got %d", kDecode, q.ndim);
    return nullptr;
  }
  Reference out, lse;
  if (kGiven) {
    out.Take(Py_NewRef(values[kInputs]));
    if (kLse) lse.Take(Py_NewRef(values[kInputs + 1]));
  } else {
    out.Take(NewTensor(values[0], {q.shape[0], q.shape[1], q.shape[2], q.shape[3]}));
    if (kLse && out) lse.Take(NewFloat32(values[0], {q.shape[0], q.shape[2], q.shape[1]}));
    if (!out || (kLse && !lse)) return nullptr;
  }
  if (!call.out.Read(out.get(), kDecode, "out") ||
      (kLse && !call.lse.Read(lse.get(), kDecode, "lse"))) {
    return nullptr;
  }
  DecodeLaunch launch;
  const Status status = launch.prepare(call.tensors(), call.options);
  if (!status.ok()) return Raise(status);
  void* stream = nullptr;
  Workspace workspace;
  if (!call.q.CurrentStream(&stream) ||
      (launch.workspace() > 0 &&
       !workspace.Get(values[0], q.device_index, stream, launch.workspace()))) {
    return nullptr;
  }
  const Status launched = WithoutGil([&] { return launch.run(workspace.data(), stream); });
  if (!launched.ok()) return Raise(launched);
  if (kGiven) Py_RETURN_NONE;
  return kLse ? PyTuple_Pack(2, out.get(), lse.get()) : out.Release();
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
    {"decode_attention_new", AsMethod(DecodeOperator<false, false>), METH_FASTCALL,
     "decode_attention_new(q, k_cache, v_cache, page_table, seqused_k, prefix, k_scale, v_scale, "
     "causal, window, scale, softcap, max_seqused_k, /)\n--\n\n"
     "The operator: allocates its result and what it needs, launches the kernels."},
    {"decode_attention_new_lse", AsMethod(DecodeOperator<false, true>), METH_FASTCALL,
     "decode_attention_new_lse(...)\n--\n\nThe same; returns (out, lse)."},
    {"decode_attention_out", AsMethod(DecodeOperator<true, false>), METH_FASTCALL,
     "decode_attention_out(...)\n--\n\nThe same; `out` is given after `seqused_k`."},
    {"decode_attention_out_lse", AsMethod(DecodeOperator<true, true>), METH_FASTCALL,
     "decode_attention_out_lse(...)\n--\n\nThe same; `out` and `lse` are given there."},
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
