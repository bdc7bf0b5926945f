// SPDX-License-Identifier: Apache-2.0
#include "kernels/routing/moe_align.h"
#include "kernels/routing/moe_align_kernels.h"
#include "kernels/routing/moe_sum.h"
#include "kernels/routing/moe_sum_kernels.h"
#include "kernels/routing/topk_align.h"
#include "kernels/routing/topk_align_kernels.h"
#include "kernels/routing/topk_softmax.h"
#include "kernels/routing/topk_softmax_kernels.h"
#include "python/bindings/call.h"
#include "python/bindings/families.h"

namespace tiercel::python {
namespace {

constexpr char kTopkSoftmax[] = "topk_softmax";
constexpr char kMoeAlign[] = "moe_align_block_size";
constexpr char kMoeSum[] = "moe_sum";
constexpr char kTopkAlign[] = "topk_softmax_align";

// A tensor or None.
struct OptionalTensor {
  PythonTensor tensor;
  const TensorView* view = nullptr;

  bool Read(PyObject* object, const char* op, const char* name) {
    if (object == Py_None) return true;
    if (!tensor.Read(object, op, name)) return false;
    view = &tensor.view();
    return true;
  }
};

bool ReadInt(PyObject* object, const char* op, const char* name, int64_t* value) {
  if (!PyIndex_Check(object)) {
    PyErr_Format(PyExc_TypeError, "%s: `%s` must be an int, got %s", op, name,
                 Py_TYPE(object)->tp_name);
    return false;
  }
  *value = PyNumber_AsSsize_t(object, PyExc_OverflowError);
  return *value != -1 || PyErr_Occurred() == nullptr;
}

bool ReadBool(PyObject* object, const char* op, const char* name, bool* value) {
  return Arguments(op, &object, 1).NextBool(name, value);
}

// What both functions below take: (scores, weights, indices, softmax_first, renormalize).
struct TopkSoftmaxCall {
  PythonTensor scores, weights, indices;
  TopkSoftmaxOptions options;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    Arguments arguments(kTopkSoftmax, values, count);
    return arguments.Expect(5) && arguments.NextTensor("scores", &scores) &&
           arguments.NextTensor("weights", &weights) && arguments.NextTensor("indices", &indices) &&
           arguments.NextBool("softmax_first", &options.softmax_first) &&
           arguments.NextBool("renormalize", &options.renormalize);
  }
};

PyObject* TopkSoftmax(PyObject*, PyObject* const* values, Py_ssize_t count) {
  TopkSoftmaxCall call;
  if (!call.Parse(values, count)) return nullptr;
  return Launch(call.scores, [&](void* stream) {
    return topk_softmax(call.scores.view(), call.weights.view(), call.indices.view(), call.options,
                        stream);
  });
}

PyObject* TopkSoftmaxPlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  TopkSoftmaxCall call;
  if (!call.Parse(values, count)) return nullptr;
  TopkSoftmaxPlan plan{};
  const Status status = topk_softmax_plan(call.scores.view(), call.weights.view(),
                                          call.indices.view(), call.options, &plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:i, s:i, s:i, s:I, s:I}", "kernel", plan.kernel ? plan.kernel : "",
                       "rows_per_block", plan.rows_per_block, "lanes_per_row", plan.lanes_per_row,
                       "vector_bytes", plan.vector_bytes, "grid", plan.grid, "block", plan.block);
}

Status LoadTopkSoftmax(int device) {
  int count = 0;
  const TopkSoftmaxKernel* kernels = topk_softmax_kernels(&count);
  for (int i = 0; i < count; ++i) {
    TIERCEL_RETURN_IF_ERROR(kernels[i].kernel.load(device));
  }
  return Status();
}

PyObject* TopkSoftmaxLoad(PyObject*, PyObject* device) { return Load(device, LoadTopkSoftmax); }

// (sorted_token_ids, expert_ids, num_tokens_post_padded): the last outputs of two operators.
struct AlignTensors {
  PythonTensor sorted, experts, number;

  bool Read(PyObject* const* values, const char* op) {
    return sorted.Read(values[0], op, "sorted_token_ids") &&
           experts.Read(values[1], op, "expert_ids") &&
           number.Read(values[2], op, "num_tokens_post_padded");
  }
  MoeAlignOutputs views() const { return {sorted.view(), experts.view(), number.view()}; }
};

// (topk_ids, expert_map, sorted_token_ids, expert_ids, num_tokens_post_padded, workspace,
// block_size, num_experts, ignore_invalid_experts).
struct MoeAlignCall {
  PythonTensor ids;
  OptionalTensor map, workspace;
  AlignTensors outputs;
  MoeAlignOptions options;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    return Arguments(kMoeAlign, values, count).Expect(9) &&
           ids.Read(values[0], kMoeAlign, "topk_ids") &&
           map.Read(values[1], kMoeAlign, "expert_map") && outputs.Read(values + 2, kMoeAlign) &&
           workspace.Read(values[5], kMoeAlign, "workspace") &&
           ReadInt(values[6], kMoeAlign, "block_size", &options.block_size) &&
           ReadInt(values[7], kMoeAlign, "num_experts", &options.num_experts) &&
           ReadBool(values[8], kMoeAlign, "ignore_invalid_experts", &options.ignore_invalid);
  }
};

PyObject* MoeAlign(PyObject*, PyObject* const* values, Py_ssize_t count) {
  MoeAlignCall call;
  if (!call.Parse(values, count)) return nullptr;
  // An empty batch has outputs all the same: the stream is that of one that is never empty.
  return Launch(call.outputs.number, [&](void* stream) {
    return moe_align(call.ids.view(), call.map.view, call.outputs.views(), call.workspace.view,
                     call.options, stream);
  });
}

PyObject* MoeAlignPlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  MoeAlignCall call;
  if (!call.Parse(values, count)) return nullptr;
  MoeAlignPlan plan{};
  const Status status = moe_align_plan(call.ids.view(), call.map.view, call.outputs.views(),
                                       call.workspace.view, call.options, &plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:I, s:I, s:I, s:I, s:I, s:I}", "kernel", plan.kernel, "items",
                       plan.items, "cluster", plan.cluster, "grid", plan.grid, "block", plan.block,
                       "dynamic_smem", plan.dynamic_smem, "launches", plan.launches);
}

PyObject* MoeAlignWorkspace(PyObject*, PyObject* const* values, Py_ssize_t count) {
  int64_t numel = 0, experts = 0;
  if (!Arguments(kMoeAlign, values, count).Expect(2) ||
      !ReadInt(values[0], kMoeAlign, "numel", &numel) ||
      !ReadInt(values[1], kMoeAlign, "num_experts", &experts)) {
    return nullptr;
  }
  return PyLong_FromLongLong(moe_align_workspace(numel, experts));
}

Status LoadMoeAlign(int device) {
  int count = 0;
  const MoeAlignKernel* kernels = moe_align_small_kernels(&count);
  for (int i = 0; i < count; ++i) TIERCEL_RETURN_IF_ERROR(kernels[i].kernel.load(device));
  TIERCEL_RETURN_IF_ERROR(moe_align_count_kernel().load(device));
  kernels = moe_align_store_kernels(&count);
  for (int i = 0; i < count; ++i) TIERCEL_RETURN_IF_ERROR(kernels[i].kernel.load(device));
  return Status();
}

PyObject* MoeAlignLoad(PyObject*, PyObject* device) { return Load(device, LoadMoeAlign); }

// (x, weights, out).
struct MoeSumCall {
  PythonTensor x, out;
  OptionalTensor weights;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    return Arguments(kMoeSum, values, count).Expect(3) && x.Read(values[0], kMoeSum, "x") &&
           weights.Read(values[1], kMoeSum, "weights") && out.Read(values[2], kMoeSum, "out");
  }
};

PyObject* MoeSum(PyObject*, PyObject* const* values, Py_ssize_t count) {
  MoeSumCall call;
  if (!call.Parse(values, count)) return nullptr;
  return Launch(call.out, [&](void* stream) {
    return moe_sum(call.x.view(), call.weights.view, call.out.view(), stream);
  });
}

PyObject* MoeSumPlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  MoeSumCall call;
  if (!call.Parse(values, count)) return nullptr;
  MoeSumPlan plan{};
  const Status status = moe_sum_plan(call.x.view(), call.weights.view, call.out.view(), &plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:i, s:(II), s:(II)}", "kernel", plan.kernel, "vector_bytes",
                       plan.vector_bytes, "grid", plan.grid_x, plan.grid_y, "block", plan.block_x,
                       plan.block_y);
}

Status LoadMoeSum(int device) {
  int count = 0;
  const MoeSumKernel* kernels = moe_sum_kernels(&count);
  for (int i = 0; i < count; ++i) TIERCEL_RETURN_IF_ERROR(kernels[i].kernel.load(device));
  return Status();
}

PyObject* MoeSumLoad(PyObject*, PyObject* device) { return Load(device, LoadMoeSum); }

// (scores, weights, indices, expert_map, sorted_token_ids, expert_ids, num_tokens_post_padded,
// block_size, softmax_first, renormalize, ignore_invalid_experts).
struct TopkAlignCall {
  PythonTensor scores, weights, indices;
  OptionalTensor map;
  AlignTensors outputs;
  TopkSoftmaxOptions topk;
  MoeAlignOptions align;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    if (!Arguments(kTopkAlign, values, count).Expect(11) ||
        !scores.Read(values[0], kTopkAlign, "scores") ||
        !weights.Read(values[1], kTopkAlign, "weights") ||
        !indices.Read(values[2], kTopkAlign, "indices") ||
        !map.Read(values[3], kTopkAlign, "expert_map") || !outputs.Read(values + 4, kTopkAlign) ||
        !ReadInt(values[7], kTopkAlign, "block_size", &align.block_size) ||
        !ReadBool(values[8], kTopkAlign, "softmax_first", &topk.softmax_first) ||
        !ReadBool(values[9], kTopkAlign, "renormalize", &topk.renormalize) ||
        !ReadBool(values[10], kTopkAlign, "ignore_invalid_experts", &align.ignore_invalid)) {
      return false;
    }
    const TensorView& view = scores.view();
    align.num_experts = view.ndim == 2 ? view.shape[1] : 1;
    return true;
  }
};

PyObject* TopkAlign(PyObject*, PyObject* const* values, Py_ssize_t count) {
  TopkAlignCall call;
  if (!call.Parse(values, count)) return nullptr;
  return Launch(call.outputs.number, [&](void* stream) {
    return topk_align(call.scores.view(), call.weights.view(), call.indices.view(), call.map.view,
                      call.outputs.views(), call.topk, call.align, stream);
  });
}

PyObject* TopkAlignPlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  TopkAlignCall call;
  if (!call.Parse(values, count)) return nullptr;
  TopkAlignPlan plan{};
  const Status status =
      topk_align_plan(call.scores.view(), call.weights.view(), call.indices.view(), call.map.view,
                      call.outputs.views(), call.topk, call.align, &plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:I, s:I, s:I}", "kernel", plan.kernel, "cluster", plan.cluster,
                       "block", plan.block, "dynamic_smem", plan.dynamic_smem);
}

Status LoadTopkAlign(int device) {
  int count = 0;
  const TopkAlignKernel* kernels = topk_align_kernels(&count);
  for (int i = 0; i < count; ++i) TIERCEL_RETURN_IF_ERROR(kernels[i].kernel.load(device));
  return Status();
}

PyObject* TopkAlignLoad(PyObject*, PyObject* device) { return Load(device, LoadTopkAlign); }

using Fast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyCFunction AsFunction(Fast function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef functions[] = {
    {"topk_softmax", AsFunction(TopkSoftmax), METH_FASTCALL,
     "topk_softmax(scores, weights, indices, softmax_first, renormalize, /)\n--\n\n"
     "Launches the kernel on the current stream; fills `weights` and `indices`."},
    {"topk_softmax_plan", AsFunction(TopkSoftmaxPlanOf), METH_FASTCALL,
     "topk_softmax_plan(scores, weights, indices, softmax_first, renormalize, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"topk_softmax_load", TopkSoftmaxLoad, METH_O,
     "topk_softmax_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."},
    {"moe_align_block_size", AsFunction(MoeAlign), METH_FASTCALL,
     "moe_align_block_size(topk_ids, expert_map, sorted_token_ids, expert_ids, "
     "num_tokens_post_padded, workspace, "
     "block_size, num_experts, ignore_invalid_experts, /)\n--\n\n"
     "Launches the kernel on the current stream; fills the outputs."},
    {"moe_align_block_size_plan", AsFunction(MoeAlignPlanOf), METH_FASTCALL,
     "moe_align_block_size_plan(topk_ids, expert_map, sorted_token_ids, expert_ids, "
     "num_tokens_post_padded, workspace, "
     "block_size, num_experts, ignore_invalid_experts, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"moe_align_block_size_workspace", AsFunction(MoeAlignWorkspace), METH_FASTCALL,
     "moe_align_block_size_workspace(numel, num_experts, /)\n--\n\n"
     "The int32 elements of workspace that a call needs, or 0."},
    {"moe_align_block_size_load", MoeAlignLoad, METH_O,
     "moe_align_block_size_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its "
     "index."},
    {"moe_sum", AsFunction(MoeSum), METH_FASTCALL,
     "moe_sum(x, weights, out, /)\n--\n\n"
     "Launches the kernel on the current stream; fills the outputs."},
    {"moe_sum_plan", AsFunction(MoeSumPlanOf), METH_FASTCALL,
     "moe_sum_plan(x, weights, out, /)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"moe_sum_load", MoeSumLoad, METH_O,
     "moe_sum_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."},
    {"topk_softmax_align", AsFunction(TopkAlign), METH_FASTCALL,
     "topk_softmax_align(scores, weights, indices, expert_map, sorted_token_ids, expert_ids, "
     "num_tokens_post_padded, block_size, softmax_first, renormalize, ignore_invalid_experts, "
     "/)\n--\n\n"
     "Launches the kernel on the current stream; fills the outputs."},
    {"topk_softmax_align_plan", AsFunction(TopkAlignPlanOf), METH_FASTCALL,
     "topk_softmax_align_plan(scores, weights, indices, expert_map, sorted_token_ids, expert_ids, "
     "num_tokens_post_padded, block_size, softmax_first, renormalize, ignore_invalid_experts, "
     "/)\n--\n\n"
     "Checks the arguments as a launch does and returns the configuration. Needs no GPU."},
    {"topk_softmax_align_load", TopkAlignLoad, METH_O,
     "topk_softmax_align_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* RoutingFunctions() { return functions; }

}  // namespace tiercel::python
