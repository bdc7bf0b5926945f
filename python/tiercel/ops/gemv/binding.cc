// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemv/nvfp4_gemv.h"
#include "kernels/gemv/nvfp4_linear.h"
#include "python/bindings/functions.h"
#include "python/bindings/tuned.h"

namespace tiercel::python {
namespace {

constexpr Field<Nvfp4GemvCall> kGemvFields[] = {
    Tensor<&Nvfp4GemvCall::a>("a"),
    Tensor<&Nvfp4GemvCall::b>("b"),
    Tensor<&Nvfp4GemvCall::scale_a>("scale_a"),
    Tensor<&Nvfp4GemvCall::scale_b>("scale_b"),
    Tensor<&Nvfp4GemvCall::scale_a_permuted>("scale_a_permuted"),
    Tensor<&Nvfp4GemvCall::scale_b_permuted>("scale_b_permuted"),
    OfStream(Tensor<&Nvfp4GemvCall::c>("c")),
};
constexpr Parameters<Nvfp4GemvCall> kGemv{"nvfp4_gemv", kGemvFields};

constexpr PlanField<Nvfp4GemvPlan> kGemvPlanFields[] = {
    Entry<&Nvfp4GemvPlan::kernel>("kernel"),
    Entry<&Nvfp4GemvPlan::rows_per_block>("rows_per_block"),
    Entry<&Nvfp4GemvPlan::parts>("parts"),
    Entry<&Nvfp4GemvPlan::grid>("grid"),
    Entry<&Nvfp4GemvPlan::block>("block"),
    Entry<&Nvfp4GemvPlan::dynamic_smem>("dynamic_smem"),
};
constexpr PlanDict<Nvfp4GemvPlan> kGemvPlan{"Nvfp4GemvPlan", kGemvPlanFields};

using LinearFields = std::array<int, 4>;

Nvfp4LinearConfig LinearConfigOf(const LinearFields& fields) {
  return {fields[0], fields[1], fields[2], fields[3]};
}

bool ReadLinearConfig(PyObject* object, const char* op, const char*, Nvfp4LinearCall* call) {
  LinearFields fields;
  if (!ReadConfig(object, op, &fields)) return false;
  call->config = LinearConfigOf(fields);
  return true;
}

constexpr char kLinearName[] = "nvfp4_linear";

constexpr Field<Nvfp4LinearCall> kLinearFields[] = {
    Tensor<&Nvfp4LinearCall::x>("x"),
    Tensor<&Nvfp4LinearCall::weight>("weight"),
    Tensor<&Nvfp4LinearCall::scale>("scale"),
    Optional<&Nvfp4LinearCall::global_scale>("global_scale"),
    OfStream(Tensor<&Nvfp4LinearCall::out>("out")),
    MayBeAbsent(Read("config", "tuple[int, ...]", ReadLinearConfig)),
};
constexpr Parameters<Nvfp4LinearCall> kLinear{
    kLinearName, kLinearFields, {}, nullptr, [] { HintOnce(nvfp4_linear_tuned(), kLinearName); }};

constexpr PlanField<Nvfp4LinearPlan> kLinearPlanFields[] = {
    Entry<&Nvfp4LinearPlan::kernel>("kernel"),
    Entry<&Nvfp4LinearPlan::cluster>("cluster"),
    Entry<&Nvfp4LinearPlan::parts>("parts"),
    Entry<&Nvfp4LinearPlan::passes>("passes"),
    Entry<&Nvfp4LinearPlan::rows>("rows"),
    Entry<&Nvfp4LinearPlan::grid>("grid"),
    Entry<&Nvfp4LinearPlan::block>("block"),
    Entry<&Nvfp4LinearPlan::dynamic_smem>("dynamic_smem"),
};
constexpr PlanDict<Nvfp4LinearPlan> kLinearPlan{"Nvfp4LinearPlan", kLinearPlanFields};

PyObject* LinearTuned(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return SetTuned(nvfp4_linear_tuned(), "nvfp4_linear_tuned", values, count, LinearConfigOf);
}

constexpr Function kFunctions[] = {
    LaunchOf<kGemv, nvfp4_gemv>("nvfp4_gemv",
                                "Launches the kernel on the current stream; fills `c`."),
    PlanOf<kGemv, nvfp4_gemv_plan, kGemvPlan>("nvfp4_gemv_plan"),
    LoadOf<nvfp4_gemv_load>("nvfp4_gemv_load"),
    LaunchOf<kLinear, nvfp4_linear>("nvfp4_linear",
                                    "Launches the kernel on the current stream; fills `out`."),
    PlanOf<kLinear, nvfp4_linear_plan, kLinearPlan>("nvfp4_linear_plan"),
    LoadOf<nvfp4_linear_load>("nvfp4_linear_load"),
    Other("nvfp4_linear_tuned", LinearTuned, kTunedArguments, "None",
          "Sets what was tuned: [(dtype, N, K, [(tokens, configuration)])]."),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
