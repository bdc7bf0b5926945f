// SPDX-License-Identifier: Apache-2.0
#include "kernels/moe/few_tokens.h"
#include "kernels/moe/moe_mlp.h"
#include "kernels/sm90/driver.h"
#include "python/bindings/call.h"
#include "python/bindings/families.h"
#include "python/bindings/optional_tensor.h"
#include "python/bindings/tuned.h"

namespace tiercel::python {
namespace {

// Of an H100 SXM or H200, for plans where there is no device to ask.
constexpr int kMultiprocessors = 132;

int MultiprocessorsOf(const TensorView& x) {
  int count = 0;
  const bool known =
      x.device_type == DeviceType::kCUDA && multiprocessor_count(x.device_index, &count).ok();
  return known ? count : kMultiprocessors;
}

bool ReadActivation(PyObject* value, const char* op, MoeActivation* activation) {
  const long index = PyLong_AsLong(value);
  if (index == -1 && PyErr_Occurred()) return false;
  if (index < 0 || index > static_cast<long>(MoeActivation::kGeluResidual)) {
    PyErr_Format(PyExc_ValueError, "%s: no activation has the index %ld", op, index);
    return false;
  }
  *activation = static_cast<MoeActivation>(index);
  return true;
}

// (x, w, sorted_token_ids, expert_ids, num_tokens_post_padded, weights or None, out, block_size,
// activation's index, topk_ids or None, experts everywhere, x_scale or None, w_scale or None) and,
// from the tuner, a configuration or None, and out_scale or None; `up` has no weights. The lists of
// the routing are None where the kernels are to route topk_ids.
struct MoeMlpCall {
  PythonTensor x, w, out;
  OptionalTensor sorted, experts, used, weights, topk_ids, x_scale, w_scale, out_scale;
  long block_size = 0, everywhere = 0;
  MoeActivation activation = MoeActivation::kSilu;
  MoeTile tile;

  bool Parse(const char* op, bool up, PyObject* const* values, Py_ssize_t count) {
    if (count == 15 && !out_scale.Read(values[--count], op, "out_scale")) return false;
    if (count == 14 && values[--count] != Py_None) {
      std::array<int, 2> fields;
      if (!ReadConfig(values[count], op, &fields)) return false;
      tile = {fields[0], fields[1]};
    }
    if (!Arguments(op, values, count).Expect(13)) return false;
    if (!x.Read(values[0], op, "x") || !w.Read(values[1], op, up ? "w_up" : "w_down") ||
        !sorted.Read(values[2], op, "sorted_token_ids") ||
        !experts.Read(values[3], op, "expert_ids") ||
        !used.Read(values[4], op, "num_tokens_post_padded") ||
        !weights.Read(values[5], op, "weights") || !out.Read(values[6], op, "out") ||
        !topk_ids.Read(values[9], op, "topk_ids") || !x_scale.Read(values[11], op, "x_scale") ||
        !w_scale.Read(values[12], op, "w_scale")) {
      return false;
    }
    block_size = PyLong_AsLong(values[7]);
    if (block_size == -1 && PyErr_Occurred()) return false;
    if (!ReadActivation(values[8], op, &activation)) return false;
    everywhere = PyLong_AsLong(values[10]);
    return everywhere != -1 || !PyErr_Occurred();
  }

  MoeRouting routing() const { return {sorted.view(), experts.view(), used.view(), block_size}; }
  MoeScales scales() const { return {x_scale.view(), w_scale.view(), out_scale.view()}; }
  MoeIds ids() const { return {topk_ids.view(), everywhere}; }
};

PyObject* MoeUp(PyObject*, PyObject* const* values, Py_ssize_t count) {
  MoeMlpCall call;
  if (!call.Parse("moe_up", true, values, count)) return nullptr;
  return Launch(call.x, [&](void* stream) {
    return moe_up(call.x.view(), call.w.view(), call.scales(), call.routing(), call.ids(),
                  call.out.view(), call.activation, call.tile, stream);
  });
}

PyObject* MoeDown(PyObject*, PyObject* const* values, Py_ssize_t count) {
  MoeMlpCall call;
  if (!call.Parse("moe_down", false, values, count)) return nullptr;
  return Launch(call.x, [&](void* stream) {
    return moe_down(call.x.view(), call.w.view(), call.scales(), call.routing(),
                    call.weights.view(), call.ids(), call.out.view(), call.tile, stream);
  });
}

PyObject* PlanOf(bool up, PyObject* const* values, Py_ssize_t count) {
  MoeMlpCall call;
  if (!call.Parse(up ? "moe_up" : "moe_down", up, values, count)) return nullptr;
  MoeMlpPlan plan{};
  const Status status =
      moe_mlp_plan(up, call.x.view(), call.w.view(), call.scales(), call.routing(),
                   call.weights.view(), call.ids(), call.out.view(), call.activation, call.tile,
                   MultiprocessorsOf(call.x.view()), &plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:i, s:i, s:i, s:i, s:I, s:I, s:I}", "kernel", plan.kernel, "tile_m",
                       plan.tile_m, "tile_n", plan.tile_n, "cluster", plan.cluster, "tiles",
                       plan.tiles, "grid", plan.grid, "block", plan.block, "dynamic_smem",
                       plan.dynamic_smem);
}

PyObject* MoeUpPlan(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return PlanOf(true, values, count);
}
PyObject* MoeDownPlan(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return PlanOf(false, values, count);
}

// (x, w_up, w_down, w_up_scale, w_down_scale, topk_weights, topk_ids, out, activation's
// index).
struct FewTokensArguments {
  PythonTensor x, w_up, w_down, up_scale, down_scale, weights, ids, out;
  MoeActivation activation = MoeActivation::kSilu;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    constexpr char kOp[] = "fused_moe";
    return Arguments(kOp, values, count).Expect(9) && x.Read(values[0], kOp, "x") &&
           w_up.Read(values[1], kOp, "w_up") && w_down.Read(values[2], kOp, "w_down") &&
           up_scale.Read(values[3], kOp, "w_up_scale") &&
           down_scale.Read(values[4], kOp, "w_down_scale") &&
           weights.Read(values[5], kOp, "topk_weights") && ids.Read(values[6], kOp, "topk_ids") &&
           out.Read(values[7], kOp, "out") && ReadActivation(values[8], kOp, &activation);
  }

  FewTokensCall call() const {
    return {&x.view(),       &w_up.view(), &w_down.view(), &up_scale.view(), &down_scale.view(),
            &weights.view(), &ids.view(),  &out.view(),    activation};
  }

  const PythonTensor& First() const { return x; }
  Status Run(void* stream) const { return fused_moe_few_tokens(call(), stream); }
};

PyObject* FewTokensPlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  FewTokensArguments arguments;
  if (!arguments.Parse(values, count)) return nullptr;
  FewTokensPlan plan{};
  const Status status =
      fused_moe_few_tokens_plan(arguments.call(), MultiprocessorsOf(arguments.x.view()), &plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:i, s:i, s:I, s:I, s:I}", "kernel", plan.kernel, "slots", plan.slots,
                       "slot_bytes", plan.slot_bytes, "grid", plan.grid, "block", plan.block,
                       "dynamic_smem", plan.dynamic_smem);
}

Status LoadAll(int device) {
  TIERCEL_RETURN_IF_ERROR(moe_mlp_load(device));
  return fused_moe_few_tokens_load(device);
}

PyObject* MoeLoad(PyObject*, PyObject* device) { return Load(device, LoadAll); }

#define TIERCEL_FAST(name, function, text)                                                     \
  {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, \
   name                                                                                        \
   "(x, w, sorted_token_ids, expert_ids, num_tokens_post_padded, weights, out, block_size, "   \
   "activation, topk_ids, experts, x_scale, w_scale, config=None, out_scale=None, "            \
   "/)\n--\n\n" text}

#define TIERCEL_FEW                                                           \
  "(x, w_up, w_down, w_up_scale, w_down_scale, topk_weights, topk_ids, out, " \
  "activation, /)\n--\n\n"

PyMethodDef functions[] = {
    TIERCEL_FAST("moe_up", MoeUp, "Launches the kernel on the current stream; fills `out`."),
    TIERCEL_FAST("moe_down", MoeDown, "Launches the kernel on the current stream; fills `out`."),
    TIERCEL_FAST("moe_up_plan", MoeUpPlan, "Checks as a launch does; the configuration."),
    TIERCEL_FAST("moe_down_plan", MoeDownPlan, "Checks as a launch does; the configuration."),
    {"fused_moe_few_tokens", AsMethod(Run<FewTokensArguments>), METH_FASTCALL,
     "fused_moe_few_tokens" TIERCEL_FEW "Launches the kernel on the current stream; fills `out`."},
    {"fused_moe_few_tokens_plan", AsMethod(FewTokensPlanOf), METH_FASTCALL,
     "fused_moe_few_tokens_plan" TIERCEL_FEW "Checks as a launch does; the configuration."},
    {"moe_load", MoeLoad, METH_O,
     "moe_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* MoeFunctions() { return functions; }

}  // namespace tiercel::python
