// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemv/nvfp4_gemv.h"
#include "kernels/gemv/nvfp4_linear.h"
#include "python/bindings/call.h"
#include "python/bindings/families.h"
#include "python/bindings/optional_tensor.h"
#include "python/bindings/tuned.h"

namespace tiercel::python {
namespace {

constexpr char kNvfp4Gemv[] = "nvfp4_gemv";
constexpr char kNvfp4Linear[] = "nvfp4_linear";

// The seven tensors.
struct Nvfp4GemvCall {
  PythonTensor a, b, scale_a, scale_b, scale_a_permuted, scale_b_permuted, c;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    Arguments arguments(kNvfp4Gemv, values, count);
    return arguments.Expect(7) && arguments.NextTensor("a", &a) && arguments.NextTensor("b", &b) &&
           arguments.NextTensor("scale_a", &scale_a) && arguments.NextTensor("scale_b", &scale_b) &&
           arguments.NextTensor("scale_a_permuted", &scale_a_permuted) &&
           arguments.NextTensor("scale_b_permuted", &scale_b_permuted) &&
           arguments.NextTensor("c", &c);
  }

  Nvfp4GemvData data() const {
    return {a.view(),
            b.view(),
            scale_a.view(),
            scale_b.view(),
            scale_a_permuted.view(),
            scale_b_permuted.view(),
            c.view()};
  }
};

PyObject* Nvfp4Gemv(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Nvfp4GemvCall call;
  if (!call.Parse(values, count)) return nullptr;
  return Launch(call.c, [&](void* stream) { return nvfp4_gemv(call.data(), stream); });
}

PyObject* Nvfp4GemvPlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Nvfp4GemvCall call;
  if (!call.Parse(values, count)) return nullptr;
  Nvfp4GemvPlan plan{};
  const Status status = nvfp4_gemv_plan(call.data(), &plan);
  if (!status.ok()) return Raise(status);
  return Py_BuildValue("{s:s, s:i, s:i, s:I, s:I, s:I}", "kernel", plan.kernel, "rows_per_block",
                       plan.rows_per_block, "parts", plan.parts, "grid", plan.grid, "block",
                       plan.block, "dynamic_smem", plan.dynamic_smem);
}

using LinearFields = std::array<int, 4>;

Nvfp4LinearConfig LinearConfigOf(const LinearFields& fields) {
  return {fields[0], fields[1], fields[2], fields[3]};
}

// (x, weight, scale, global_scale or None, out) and, from the tuner, a configuration
struct Nvfp4LinearCall {
  PythonTensor x, weight, scale, out;
  OptionalTensor global_scale;
  Nvfp4LinearConfig given{};
  const Nvfp4LinearConfig* config = nullptr;

  bool Parse(PyObject* const* values, Py_ssize_t count) {
    if (count == 6) {
      LinearFields fields;
      if (!ReadConfig(values[--count], kNvfp4Linear, &fields)) return false;
      given = LinearConfigOf(fields);
      config = &given;
    }
    return Arguments(kNvfp4Linear, values, count).Expect(5) &&
           x.Read(values[0], kNvfp4Linear, "x") && weight.Read(values[1], kNvfp4Linear, "weight") &&
           scale.Read(values[2], kNvfp4Linear, "scale") &&
           global_scale.Read(values[3], kNvfp4Linear, "global_scale") &&
           out.Read(values[4], kNvfp4Linear, "out");
  }
};

PyObject* Nvfp4Linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Nvfp4LinearCall call;
  if (!call.Parse(values, count)) return nullptr;
  PyObject* result = Launch(call.out, [&](void* stream) {
    return nvfp4_linear(call.x.view(), call.weight.view(), call.scale.view(),
                        call.global_scale.view(), call.out.view(), call.config, stream);
  });
  if (result != nullptr) HintOnce(nvfp4_linear_tuned(), kNvfp4Linear);
  return result;
}

PyObject* Nvfp4LinearPlanOf(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Nvfp4LinearCall call;
  if (!call.Parse(values, count)) return nullptr;
  Nvfp4LinearPlan plan{};
  const Status status =
      nvfp4_linear_plan(call.x.view(), call.weight.view(), call.scale.view(),
                        call.global_scale.view(), call.out.view(), call.config, &plan);
  if (!status.ok()) return Raise(status);
  HintOnce(nvfp4_linear_tuned(), kNvfp4Linear);
  return Py_BuildValue("{s:s, s:i, s:i, s:i, s:i, s:I, s:I, s:I}", "kernel", plan.kernel, "cluster",
                       plan.cluster, "parts", plan.parts, "passes", plan.passes, "rows", plan.rows,
                       "grid", plan.grid, "block", plan.block, "dynamic_smem", plan.dynamic_smem);
}

PyObject* Nvfp4GemvLoad(PyObject*, PyObject* device) { return Load(device, nvfp4_gemv_load); }
PyObject* Nvfp4LinearLoad(PyObject*, PyObject* device) { return Load(device, nvfp4_linear_load); }

PyObject* Nvfp4LinearTuned(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return SetTuned(nvfp4_linear_tuned(), "nvfp4_linear_tuned", values, count, LinearConfigOf);
}

#define TIERCEL_FAST(name, function, signature, text)                                          \
  {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, \
   name signature "\n--\n\n" text}

PyMethodDef functions[] = {
    TIERCEL_FAST("nvfp4_gemv", Nvfp4Gemv,
                 "(a, b, scale_a, scale_b, scale_a_permuted, scale_b_permuted, c, /)",
                 "Launches the kernel on the current stream; fills `c`."),
    TIERCEL_FAST(
        "nvfp4_gemv_plan", Nvfp4GemvPlanOf,
        "(a, b, scale_a, scale_b, scale_a_permuted, scale_b_permuted, c, /)",
        "Checks the arguments as a launch does and returns the configuration. Needs no GPU."),
    {"nvfp4_gemv_load", Nvfp4GemvLoad, METH_O,
     "nvfp4_gemv_load(device, /)\n--\n\nLoads the kernel on a CUDA device, by its index."},
    TIERCEL_FAST("nvfp4_linear", Nvfp4Linear,
                 "(x, weight, scale, global_scale, out, config=..., /)",
                 "Launches the kernel on the current stream; fills `out`."),
    TIERCEL_FAST(
        "nvfp4_linear_plan", Nvfp4LinearPlanOf,
        "(x, weight, scale, global_scale, out, config=..., /)",
        "Checks the arguments as a launch does and returns the configuration. Needs no GPU."),
    {"nvfp4_linear_load", Nvfp4LinearLoad, METH_O,
     "nvfp4_linear_load(device, /)\n--\n\nLoads the kernels on a CUDA device, by its index."},
    TIERCEL_FAST("nvfp4_linear_tuned", Nvfp4LinearTuned, "(device, problems, /)",
                 "Sets what was tuned: [(dtype, N, K, [(tokens, configuration)])]."),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* GemvFunctions() { return functions; }

}  // namespace tiercel::python
