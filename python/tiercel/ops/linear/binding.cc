// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/linear_act_kernels.h"
#include "kernels/linear/linear_weight_kernels.h"
#include "python/bindings/functions.h"
#include "python/bindings/tuned.h"

namespace tiercel::python {
namespace {

using Fields = std::array<int, 6>;

LinearActConfig ConfigOf(const Fields& fields) {
  return {fields[0], fields[1], fields[2] != 0, fields[3] != 0, fields[4], fields[5]};
}

bool ReadLinearConfig(PyObject* object, const char* op, const char*, LinearActCall* call) {
  Fields fields;
  if (!ReadConfig(object, op, &fields)) return false;
  call->config = ConfigOf(fields);
  return true;
}

constexpr char kLinearName[] = "linear_act";

constexpr auto kX = Tensor<&LinearActCall::x>("x");
constexpr auto kWeight = Tensor<&LinearActCall::w>("weight");
constexpr auto kBias = Optional<&LinearActCall::bias>("bias");
constexpr auto kOut = Tensor<&LinearActCall::y>("out");
constexpr auto kActivation = Index<Activation::kGeluTanh, &LinearActCall::activation>("activation");

constexpr Field<LinearActCall> kLinearFields[] = {
    kX,          kWeight,
    kBias,       Optional<&LinearActCall::residual>("residual"),
    kOut,        Optional<&LinearActCall::sums>("sums"),
    kActivation, MayBeAbsent(Read("config", "tuple[int, ...]", ReadLinearConfig)),
};
constexpr Parameters<LinearActCall> kLinear{
    kLinearName, kLinearFields, {}, nullptr, [] { HintOnce(linear_act_tuned(), kLinearName); }};

constexpr LinearActCall Gated() {
  LinearActCall call;
  call.gated = true;
  return call;
}
constexpr Field<LinearActCall> kGatedFields[] = {kX, kWeight, kBias, kOut, kActivation};
constexpr Parameters<LinearActCall> kGated{"gated_linear", kGatedFields, Gated()};

constexpr auto kXScale = Tensor<&LinearActCall::x_scale>("x_scale");
constexpr auto kWeightScale = Tensor<&LinearActCall::w_scale>("weight_scale");
constexpr auto kConfig = MayBeAbsent(Read("config", "tuple[int, ...]", ReadLinearConfig));
constexpr Field<LinearActCall> kGatedFp8Fields[] = {kX,    kWeight, kXScale,     kWeightScale,
                                                    kBias, kOut,    kActivation, kConfig};
constexpr Parameters<LinearActCall> kGatedFp8{"gated_linear", kGatedFp8Fields, Gated()};

constexpr Field<LinearActCall> kFp8Fields[] = {
    kX,    kWeight, kXScale,     kWeightScale,
    kBias, kOut,    kActivation, MayBeAbsent(Read("config", "tuple[int, ...]", ReadLinearConfig)),
};
constexpr Parameters<LinearActCall> kFp8{"fp8_linear", kFp8Fields};

bool ReadOfWeight(PyObject* object, const char* op, const char* name, LinearGradientCall* call) {
  bool of_weight = false;
  if (!ReadValue(object, op, name, &of_weight)) return false;
  call->of = of_weight ? LinearGradient::kWeight : LinearGradient::kX;
  return true;
}

constexpr Field<LinearGradientCall> kGradientFields[] = {
    Tensor<&LinearGradientCall::grad>("grad"),
    Tensor<&LinearGradientCall::other>("other"),
    Tensor<&LinearGradientCall::out>("out"),
    Read("of_weight", "bool", ReadOfWeight),
};
constexpr Parameters<LinearGradientCall> kGradient{"linear_act_grad", kGradientFields};

constexpr Field<LinearWeightCall> kWeightFields[] = {
    Tensor<&LinearWeightCall::grad>("grad"),
    Tensor<&LinearWeightCall::x>("x"),
    Tensor<&LinearWeightCall::grad_scale>("grad_scale"),
    Tensor<&LinearWeightCall::x_scale>("x_scale"),
    OfStream(Tensor<&LinearWeightCall::out>("out")),
    Value<&LinearWeightCall::add>("add"),
};
constexpr Parameters<LinearWeightCall> kWeightGradient{"fp8_linear_weight_grad", kWeightFields};

constexpr PlanField<LinearWeightPlan> kWeightPlanFields[] = {
    Entry<&LinearWeightPlan::kernel>("kernel"),
    Entry<&LinearWeightPlan::tile_m>("tile_m"),
    Entry<&LinearWeightPlan::tile_n>("tile_n"),
    Entry<&LinearWeightPlan::cluster>("cluster"),
    Entry<&LinearWeightPlan::group>("group"),
    Entry<&LinearWeightPlan::grid>("grid"),
    Entry<&LinearWeightPlan::block>("block"),
    Entry<&LinearWeightPlan::dynamic_smem>("dynamic_smem"),
    Entry<&LinearWeightPlan::rows>("rows"),
};
constexpr PlanDict<LinearWeightPlan> kWeightPlan{"LinearWeightPlan", kWeightPlanFields};

constexpr PlanField<LinearActPlan> kPlanFields[] = {
    Entry<&LinearActPlan::kernel>("kernel"),
    Entry<&LinearActPlan::tile_m>("tile_m"),
    Entry<&LinearActPlan::tile_n>("tile_n"),
    Entry<&LinearActPlan::pingpong>("pingpong"),
    Entry<&LinearActPlan::cluster>("cluster"),
    Entry<&LinearActPlan::splits>("splits"),
    Entry<&LinearActPlan::group>("group"),
    Entry<&LinearActPlan::rows>("rows"),
    Entry<&LinearActPlan::grid>("grid"),
    Entry<&LinearActPlan::block>("block"),
    Entry<&LinearActPlan::dynamic_smem>("dynamic_smem"),
};
constexpr PlanDict<LinearActPlan> kPlan{"LinearActPlan", kPlanFields};

PyObject* LinearActTuned(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return SetTuned(linear_act_tuned(), "linear_act_tuned", values, count, ConfigOf);
}

constexpr char kFills[] =
    "Launches the kernel on the current stream; fills `out`. `activation` is its index.";

constexpr Function kFunctions[] = {
    LaunchOf<kLinear, linear_act>(
        "linear_act",
        "Launches the kernel on the current stream; fills `out`, and `sums` with the activation's "
        "arguments. `activation` is its index."),
    PlanOf<kLinear, linear_act_plan, kPlan>("linear_act_plan"),
    LaunchOf<kGated, linear_act>("gated_linear", kFills),
    PlanOf<kGated, linear_act_plan, kPlan>("gated_linear_plan"),
    LaunchOf<kGatedFp8, linear_act>("gated_linear_fp8", kFills),
    PlanOf<kGatedFp8, linear_act_plan, kPlan>("gated_linear_fp8_plan"),
    LaunchOf<kFp8, linear_act>("fp8_linear", kFills),
    PlanOf<kFp8, linear_act_plan, kPlan>("fp8_linear_plan"),
    LaunchOf<kGradient, linear_gradient>(
        "linear_act_grad",
        "The backward's product: grad @ weight, or grad.T @ x `of_weight`; fills `out`."),
    PlanOf<kGradient, linear_gradient_plan, kPlan>("linear_act_grad_plan"),
    LoadOf<linear_act_kernels>("linear_act_load"),
    LaunchOf<kWeightGradient, linear_weight>(
        "fp8_linear_weight_grad",
        "The float8 weight's gradient: grad @ x.T; fills `out`, or adds to it (`add`)."),
    PlanOf<kWeightGradient, linear_weight_plan, kWeightPlan>("fp8_linear_weight_grad_plan"),
    LoadOf<linear_weight_kernels>("fp8_linear_weight_grad_load"),
    Other("linear_act_tuned", LinearActTuned, kTunedArguments, "None",
          "Sets what was tuned: [(dtype, N, K, [(M, configuration)])]."),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
