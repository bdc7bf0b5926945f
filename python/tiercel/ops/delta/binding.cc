// SPDX-License-Identifier: Apache-2.0
#include "kernels/delta/delta_backward.h"
#include "kernels/delta/delta_decode.h"
#include "kernels/delta/delta_kernels.h"
#include "kernels/delta/delta_rule.h"
#include "kernels/delta/gated_norm.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

using Decode = DeltaDecodeCall;
constexpr Field<Decode> kDecodeFields[] = {
    Tensor<&Decode::q>("q"),
    Tensor<&Decode::k>("k"),
    Tensor<&Decode::v>("v"),
    Tensor<&Decode::g>("g"),
    Tensor<&Decode::beta>("beta"),
    Tensor<&Decode::states>("states"),
    Tensor<&Decode::out>("out"),
    Optional<&Decode::state_indices>("state_indices"),
    Optional<&Decode::accepted>("accepted"),
    ValueOrNone<&Decode::scale>("scale"),
    Value<&Decode::qk_l2norm>("qk_l2norm"),
};
constexpr Parameters<Decode> kDecode{"gated_delta_rule_decode", kDecodeFields};

constexpr PlanField<DeltaDecodePlan> kDecodePlanFields[] = {
    Entry<&DeltaDecodePlan::kernel>("kernel"),
    Entry<&DeltaDecodePlan::grid>("grid"),
    Entry<&DeltaDecodePlan::block>("block"),
    Entry<&DeltaDecodePlan::dynamic_smem>("dynamic_smem"),
};
constexpr PlanDict<DeltaDecodePlan> kDecodePlan{"DeltaDecodePlan", kDecodePlanFields};

using Rule = DeltaRuleCall;
constexpr Field<Rule> kRuleFields[] = {
    Tensor<&Rule::q>("q"),
    Tensor<&Rule::k>("k"),
    Tensor<&Rule::v>("v"),
    Tensor<&Rule::g>("g"),
    Tensor<&Rule::beta>("beta"),
    Optional<&Rule::initial_state>("initial_state"),
    Optional<&Rule::cu_seqlens>("cu_seqlens"),
    Tensor<&Rule::out>("out"),
    Optional<&Rule::final_state>("final_state"),
    Optional<&Rule::workspace>("workspace"),
    ValueOrNone<&Rule::scale>("scale"),
    Value<&Rule::qk_l2norm>("qk_l2norm"),
};
constexpr Parameters<Rule> kRule{"gated_delta_rule", kRuleFields};

Status CheckWorkspace(const Rule& call) {
  if (call.workspace != nullptr) return Status();
  return Status::TypeError("gated_delta_rule: `workspace` must be a tensor, got None");
}

constexpr PlanField<DeltaRulePlan> kRulePlanFields[] = {
    Entry<&DeltaRulePlan::chunks>("chunks"),
    Entry<&DeltaRulePlan::kernel>("kernel"),
    Entry<&DeltaRulePlan::groups>("groups"),
    Entry<&DeltaRulePlan::segment_chunks>("segment_chunks"),
    Entry<&DeltaRulePlan::chunk_grid>("chunk_grid"),
    Entry<&DeltaRulePlan::chunk_rows>("chunk_rows"),
    Entry<&DeltaRulePlan::beside>("beside"),
    Entry<&DeltaRulePlan::grid>("grid"),
    Entry<&DeltaRulePlan::dynamic_smem>("dynamic_smem"),
    Entry<&DeltaRulePlan::workspace>("workspace"),
};
constexpr PlanDict<DeltaRulePlan> kRulePlan{"DeltaRulePlan", kRulePlanFields};

using Backward = DeltaBackwardCall;
constexpr Field<Backward> kBackwardFields[] = {
    Tensor<&Backward::rule, &Rule::out>("grad"),
    Tensor<&Backward::rule, &Rule::q>("q"),
    Tensor<&Backward::rule, &Rule::k>("k"),
    Tensor<&Backward::rule, &Rule::v>("v"),
    Tensor<&Backward::rule, &Rule::g>("g"),
    Tensor<&Backward::rule, &Rule::beta>("beta"),
    Optional<&Backward::rule, &Rule::final_state>("grad_final"),
    Optional<&Backward::rule, &Rule::initial_state>("initial_state"),
    Optional<&Backward::rule, &Rule::cu_seqlens>("cu_seqlens"),
    Tensor<&Backward::dq>("dq"),
    Tensor<&Backward::dk>("dk"),
    Tensor<&Backward::dv>("dv"),
    Tensor<&Backward::dg>("dg"),
    Tensor<&Backward::dbeta>("dbeta"),
    Optional<&Backward::grad_initial>("grad_initial"),
    Optional<&Backward::rule, &Rule::workspace>("workspace"),
    ValueOrNone<&Backward::rule, &Rule::scale>("scale"),
    Value<&Backward::rule, &Rule::qk_l2norm>("qk_l2norm"),
};
constexpr Parameters<Backward> kBackward{"gated_delta_rule_backward", kBackwardFields};

Status CheckBackwardWorkspace(const Backward& call) { return CheckWorkspace(call.rule); }

constexpr PlanField<DeltaBackwardPlan> kBackwardPlanFields[] = {
    Entry<&DeltaBackwardPlan::chunks>("chunks"),
    Entry<&DeltaBackwardPlan::passes>("passes"),
    Entry<&DeltaBackwardPlan::gradients>("gradients"),
    Entry<&DeltaBackwardPlan::groups>("groups"),
    Entry<&DeltaBackwardPlan::segment_chunks>("segment_chunks"),
    Entry<&DeltaBackwardPlan::chunk_grid>("chunk_grid"),
    Entry<&DeltaBackwardPlan::pass_grid>("pass_grid"),
    Entry<&DeltaBackwardPlan::workspace>("workspace"),
};
constexpr PlanDict<DeltaBackwardPlan> kBackwardPlan{"DeltaBackwardPlan", kBackwardPlanFields};

constexpr Field<GatedNormCall> kNormFields[] = {
    Tensor<&GatedNormCall::x>("x"),           Tensor<&GatedNormCall::gate>("gate"),
    Tensor<&GatedNormCall::weight>("weight"), Tensor<&GatedNormCall::out>("out"),
    Value<&GatedNormCall::eps>("eps"),
};
constexpr Parameters<GatedNormCall> kNorm{"gated_rms_norm", kNormFields};

constexpr PlanField<GatedNormPlan> kNormPlanFields[] = {
    Entry<&GatedNormPlan::kernel>("kernel"),
    Entry<&GatedNormPlan::lanes>("lanes"),
    Entry<&GatedNormPlan::grid>("grid"),
};
constexpr PlanDict<GatedNormPlan> kNormPlan{"GatedNormPlan", kNormPlanFields};

constexpr Function kFunctions[] = {
    LaunchOf<kDecode, delta_decode>(
        "gated_delta_rule_decode",
        "Launches the kernel on the current stream; fills `out` and replaces `states`."),
    PlanOf<kDecode, delta_decode_plan, kDecodePlan>("gated_delta_rule_decode_plan"),
    LoadOf<delta_decode_kernels>("gated_delta_rule_decode_load"),
    LaunchOf<kRule, delta_rule, CheckWorkspace>(
        "gated_delta_rule",
        "Launches the kernels on the current stream; fills `out` and `final_state`."),
    PlanOf<kRule, delta_rule_plan, kRulePlan>("gated_delta_rule_plan", kPlanWithoutWorkspace),
    LoadOf<delta_chunks_kernels, delta_channels_kernels, delta_rule_kernels>(
        "gated_delta_rule_load"),
    LaunchOf<kBackward, delta_backward, CheckBackwardWorkspace>(
        "gated_delta_rule_backward",
        "Launches the kernels on the current stream; fills the gradients."),
    PlanOf<kBackward, delta_backward_plan, kBackwardPlan>("gated_delta_rule_backward_plan",
                                                          kPlanWithoutWorkspace),
    LoadOf<delta_chunks_kernels, delta_channels_kernels, delta_back_kernels,
           delta_gradients_kernels, delta_channel_gradients_kernels>(
        "gated_delta_rule_backward_load"),
    LaunchOf<kNorm, gated_norm>("gated_rms_norm",
                                "Launches the kernel on the current stream; fills `out`."),
    PlanOf<kNorm, gated_norm_plan, kNormPlan>("gated_rms_norm_plan"),
    LoadOf<gated_norm_kernels>("gated_rms_norm_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
