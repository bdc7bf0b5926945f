// SPDX-License-Identifier: Apache-2.0
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

// (x, w, sorted_token_ids, expert_ids, num_tokens_post_padded, weights or None, out, block_size,
// activation's index, topk_ids or None, experts everywhere, x_scale or None, w_scale or None) and,
// from the tuner, a configuration or None; `up` has no weights.
struct MoeMlpCall {
  PythonTensor x, w, sorted, experts, used, out;
  OptionalTensor weights, topk_ids, x_scale, w_scale;
  long block_size = 0, everywhere = 0;
  MoeActivation activation = MoeActivation::kSilu;
  MoeTile tile;

  bool Parse(const char* op, bool up, PyObject* const* values, Py_ssize_t count) {
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
    const long index = PyLong_AsLong(values[8]);
    if (index == -1 && PyErr_Occurred()) return false;
    if (index < 0 || index > static_cast<long>(MoeActivation::kGeluResidual)) {
      PyErr_Format(PyExc_ValueError, "%s: no activation has the index %ld", op, index);
      return false;
    }
    activation = static_cast<MoeActivation>(index);
    everywhere = PyLong_AsLong(values[10]);
    return everywhere != -1 || !PyErr_Occurred();
  }

  MoeRouting routing() const { return {sorted.view(), experts.view(), used.view(), block_size}; }
  MoeScales scales() const { return {x_scale.view(), w_scale.view()}; }
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
  int multiprocessors = 0;
  if (call.x.view().device_type != DeviceType::kCUDA ||
      !multiprocessor_count(call.x.view().device_index, &multiprocessors).ok()) {
    multiprocessors = kMultiprocessors;
  }
  MoeMlpPlan plan{};
  const Status status = moe_mlp_plan(
      up, call.x.view(), call.w.view(), call.scales(), call.routing(), call.weights.view(),
      call.ids(), call.out.view(), call.activation, call.tile, multiprocessors, &plan);
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
PyObject* MoeLoad(PyObject*, PyObject* device) { return Load(device, moe_mlp_load); }

#define TIERCEL_FAST(name, function, text)                                                     \
  {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, \
   name                                                                                        \
   "(x, w, sorted_token_ids, expert_ids, num_tokens_post_padded, weights, out, block_size, "   \
   "activation, topk_ids, experts, x_scale, w_scale, config=None, /)\n--\n\n" text}

PyMethodDef functions[] = {
    TIERCEL_FAST("moe_up", MoeUp, "Launches the kernel on the current stream; fills `out`."),
    TIERCEL_FAST("moe_down", MoeDown, "Launches the kernel on the current stream; fills `out`."),
    TIERCEL_FAST("moe_up_plan", MoeUpPlan, "Checks as a launch does; the configuration."),
    TIERCEL_FAST("moe_down_plan", MoeDownPlan, "Checks as a launch does; the configuration."),
    {"moe_load", MoeLoad, METH_O,
     "moe_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* MoeFunctions() { return functions; }

}  // namespace tiercel::python
