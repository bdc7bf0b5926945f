// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemv/nvfp4_gemv.h"
#include "kernels/gemv/w4_linear.h"
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

bool ReadLinearConfig(PyObject* object, const char* op, const char*, W4LinearCall* call) {
  LinearFields fields;
  if (!ReadConfig(object, op, &fields)) return false;
  call->config = LinearConfigOf(fields);
  return true;
}

constexpr auto kX = Tensor<&W4LinearCall::x>("x");
constexpr auto kWeight = Tensor<&W4LinearCall::weight>("weight");
constexpr auto kScale = Tensor<&W4LinearCall::scale>("scale");
constexpr auto kGlobalScale = Optional<&W4LinearCall::global_scale>("global_scale");
constexpr auto kLinearOut = OfStream(Tensor<&W4LinearCall::out>("out"));

constexpr char kLinearName[] = "nvfp4_linear";

constexpr W4LinearCall OfNvfp4() {
  W4LinearCall call;
  call.op = kLinearName;
  return call;
}
constexpr Field<W4LinearCall> kLinearFields[] = {
    kX,           kWeight,    kScale,
    kGlobalScale, kLinearOut, MayBeAbsent(Read("config", "tuple[int, ...]", ReadLinearConfig)),
};
constexpr Parameters<W4LinearCall> kLinear{kLinearName, kLinearFields, OfNvfp4(), nullptr,
                                           [] { HintOnce(nvfp4_linear_tuned(), kLinearName); }};

bool ReadTiles(PyObject* object, const char* op, const char*, W4LinearCall* call) {
  if (PyTuple_Check(object) && PyTuple_Size(object) == 4) {
    std::array<int, 4> fields;
    if (!ReadConfig(object, op, &fields)) return false;
    call->tiles = {fields[0], fields[1], fields[2], fields[3]};
    return true;
  }
  std::array<int, 3> fields;
  if (!ReadConfig(object, op, &fields)) return false;
  call->tiles = {fields[0], fields[1], fields[2], 0};
  return true;
}

constexpr Field<W4LinearCall> kW4Fields[] = {
    kX,
    kWeight,
    kScale,
    Optional<&W4LinearCall::zero_point>("zero_point"),
    kGlobalScale,
    Optional<&W4LinearCall::bias>("bias"),
    Optional<&W4LinearCall::x_scale>("x_scale"),
    kLinearOut,
    Index<W4Format::kInt4, &W4LinearCall::format>("format"),
    Index<W4Activation::kReluSquared, &W4LinearCall::activation>("activation"),
    MayBeAbsent(Read("tiles", "tuple[int, ...]", ReadTiles)),
};
constexpr Parameters<W4LinearCall> kW4{"w4_linear", kW4Fields};

constexpr PlanField<W4LinearPlan> kLinearPlanFields[] = {
    Entry<&W4LinearPlan::kernel>("kernel"),
    Entry<&W4LinearPlan::cluster>("cluster"),
    Entry<&W4LinearPlan::parts>("parts"),
    Entry<&W4LinearPlan::passes>("passes"),
    Entry<&W4LinearPlan::rows>("rows"),
    Entry<&W4LinearPlan::tokens>("tokens"),
    Entry<&W4LinearPlan::grid>("grid"),
    Entry<&W4LinearPlan::block>("block"),
    Entry<&W4LinearPlan::dynamic_smem>("dynamic_smem"),
    Entry<&W4LinearPlan::tail>("tail"),
    Entry<&W4LinearPlan::tail_cluster>("tail_cluster"),
};
constexpr PlanDict<W4LinearPlan> kLinearPlan{"W4LinearPlan", kLinearPlanFields};

Status W4Load(int device) {
  for (W4Format format : {W4Format::kNvfp4, W4Format::kMxfp4, W4Format::kInt4}) {
    TIERCEL_RETURN_IF_ERROR(w4_linear_load(format, device));
  }
  return Status();
}

PyObject* LinearTuned(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return SetTuned(nvfp4_linear_tuned(), "nvfp4_linear_tuned", values, count, LinearConfigOf);
}

constexpr Function kFunctions[] = {
    LaunchOf<kGemv, nvfp4_gemv>("nvfp4_gemv",
                                "Launches the kernel on the current stream; fills `c`."),
    PlanOf<kGemv, nvfp4_gemv_plan, kGemvPlan>("nvfp4_gemv_plan"),
    LoadOf<nvfp4_gemv_load>("nvfp4_gemv_load"),
    LaunchOf<kLinear, w4_linear>("nvfp4_linear",
                                 "Launches the kernel on the current stream; fills `out`."),
    PlanOf<kLinear, w4_linear_plan, kLinearPlan>("nvfp4_linear_plan"),
    LoadOf<nvfp4_linear_load>("nvfp4_linear_load"),
    LaunchOf<kW4, w4_linear>("w4_linear",
                             "Launches the kernel on the current stream; fills `out`."),
    PlanOf<kW4, w4_linear_plan, kLinearPlan>("w4_linear_plan"),
    LoadOf<W4Load>("w4_linear_load"),
    Other("nvfp4_linear_tuned", LinearTuned, kTunedArguments, "None",
          "Sets what was tuned: [(dtype, N, K, [(tokens, configuration)])]."),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
