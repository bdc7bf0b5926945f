// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "kernels/attention/backward/backward.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

constexpr Field<AttentionBackwardCall> kFields[] = {
    Tensor<&AttentionBackwardCall::grad>("grad"),
    OfStream(Tensor<&AttentionBackwardCall::q>("q")),
    Tensor<&AttentionBackwardCall::k>("k"),
    Tensor<&AttentionBackwardCall::v>("v"),
    Tensor<&AttentionBackwardCall::out>("out"),
    Tensor<&AttentionBackwardCall::lse>("lse"),
    Optional<&AttentionBackwardCall::grad_lse>("grad_lse"),
    Tensor<&AttentionBackwardCall::dq>("dq"),
    Tensor<&AttentionBackwardCall::dk>("dk"),
    Tensor<&AttentionBackwardCall::dv>("dv"),
    Optional<&AttentionBackwardCall::workspace>("workspace"),
    Value<&AttentionBackwardCall::options, &AttentionOptions::left>("left"),
    Value<&AttentionBackwardCall::options, &AttentionOptions::right>("right"),
    Value<&AttentionBackwardCall::options, &AttentionOptions::scale>("scale"),
    Value<&AttentionBackwardCall::options, &AttentionOptions::softcap>("softcap"),
    Value<&AttentionBackwardCall::deterministic>("deterministic"),
};
constexpr Parameters<AttentionBackwardCall> kBackward{"attention_backward", kFields};

constexpr Field<AttentionBackwardCall> kVarlenFields[] = {
    Tensor<&AttentionBackwardCall::grad>("grad"),
    OfStream(Tensor<&AttentionBackwardCall::q>("q")),
    Tensor<&AttentionBackwardCall::k>("k"),
    Tensor<&AttentionBackwardCall::v>("v"),
    Tensor<&AttentionBackwardCall::starts_q>("cu_seqlens_q"),
    Tensor<&AttentionBackwardCall::starts_k>("cu_seqlens_k"),
    Tensor<&AttentionBackwardCall::out>("out"),
    Tensor<&AttentionBackwardCall::lse>("lse"),
    Optional<&AttentionBackwardCall::grad_lse>("grad_lse"),
    Tensor<&AttentionBackwardCall::dq>("dq"),
    Tensor<&AttentionBackwardCall::dk>("dk"),
    Tensor<&AttentionBackwardCall::dv>("dv"),
    Optional<&AttentionBackwardCall::workspace>("workspace"),
    Value<&AttentionBackwardCall::options, &AttentionOptions::left>("left"),
    Value<&AttentionBackwardCall::options, &AttentionOptions::right>("right"),
    Value<&AttentionBackwardCall::options, &AttentionOptions::scale>("scale"),
    Value<&AttentionBackwardCall::options, &AttentionOptions::softcap>("softcap"),
    Value<&AttentionBackwardCall::deterministic>("deterministic"),
};
constexpr Parameters<AttentionBackwardCall> kVarlenBackward{"attention_varlen_backward",
                                                            kVarlenFields};

Status CheckWorkspace(const AttentionBackwardCall& call) {
  if (call.workspace != nullptr) return Status();
  const char* op = call.starts_q == nullptr ? "attention_backward" : "attention_varlen_backward";
  return Status::TypeError(std::string(op) + ": `workspace` must be a tensor, got None");
}

constexpr PlanField<AttentionBackwardPlan> kPlanFields[] = {
    Entry<&AttentionBackwardPlan::kernel>("kernel"),
    Entry<&AttentionBackwardPlan::tile_m>("tile_m"),
    Entry<&AttentionBackwardPlan::tile_n>("tile_n"),
    Entry<&AttentionBackwardPlan::band>("band"),
    Entry<&AttentionBackwardPlan::descending>("descending"),
    Entry<&AttentionBackwardPlan::grid>("grid"),
    Entry<&AttentionBackwardPlan::block>("block"),
    Entry<&AttentionBackwardPlan::dynamic_smem>("dynamic_smem"),
    Entry<&AttentionBackwardPlan::workspace>("workspace"),
};
constexpr PlanDict<AttentionBackwardPlan> kPlan{"AttentionBackwardPlan", kPlanFields};

constexpr Function kFunctions[] = {
    LaunchOf<kBackward, attention_backward, CheckWorkspace>(
        "attention_backward",
        "Launches the kernels on the current stream; fills `dq`, `dk` and `dv`."),
    PlanOf<kBackward, attention_backward_plan, kPlan>("attention_backward_plan",
                                                      kPlanWithoutWorkspace),
    LaunchOf<kVarlenBackward, attention_varlen_backward, CheckWorkspace>(
        "attention_varlen_backward",
        "Launches the kernels on the current stream; fills `dq`, `dk` and `dv`."),
    PlanOf<kVarlenBackward, attention_varlen_backward_plan, kPlan>("attention_varlen_backward_plan",
                                                                   kPlanWithoutWorkspace),
    LoadOf<attention_backward_load>("attention_backward_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
