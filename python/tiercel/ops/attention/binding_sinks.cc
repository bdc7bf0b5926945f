// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/sinks/sinks.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

constexpr Field<AttentionSinksCall> kFields[] = {
    Tensor<&AttentionSinksCall::grad>("grad"),
    Tensor<&AttentionSinksCall::out>("out"),
    Tensor<&AttentionSinksCall::lse>("lse"),
    Optional<&AttentionSinksCall::grad_lse>("grad_lse"),
    Tensor<&AttentionSinksCall::sinks>("sinks"),
    Tensor<&AttentionSinksCall::dsinks>("dsinks"),
    Optional<&AttentionSinksCall::workspace>("workspace"),
};
constexpr Parameters<AttentionSinksCall> kSinks{"attention_sinks_backward", kFields};

Status CheckWorkspace(const AttentionSinksCall& call) {
  if (call.workspace != nullptr) return Status();
  return Status::TypeError("attention_sinks_backward: `workspace` must be a tensor, got None");
}

constexpr PlanField<AttentionSinksPlan> kPlanFields[] = {
    Entry<&AttentionSinksPlan::kernel>("kernel"),       Entry<&AttentionSinksPlan::parts>("parts"),
    Entry<&AttentionSinksPlan::grid>("grid"),           Entry<&AttentionSinksPlan::block>("block"),
    Entry<&AttentionSinksPlan::workspace>("workspace"),
};
constexpr PlanDict<AttentionSinksPlan> kPlan{"AttentionSinksPlan", kPlanFields};

constexpr Function kFunctions[] = {
    LaunchOf<kSinks, attention_sinks_backward, CheckWorkspace>(
        "attention_sinks_backward", "Launches the kernels on the current stream; fills `dsinks`."),
    PlanOf<kSinks, attention_sinks_backward_plan, kPlan>("attention_sinks_backward_plan",
                                                         kPlanWithoutWorkspace),
    LoadOf<attention_sinks_load>("attention_sinks_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
