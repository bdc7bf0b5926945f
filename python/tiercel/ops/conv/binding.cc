// SPDX-License-Identifier: Apache-2.0
#include "kernels/conv/causal_conv1d.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

constexpr Field<ConvCall> kFields[] = {
    Tensor<&ConvCall::x>("x"),         Tensor<&ConvCall::weight>("weight"),
    Optional<&ConvCall::bias>("bias"), Optional<&ConvCall::cu_seqlens>("cu_seqlens"),
    Tensor<&ConvCall::out>("out"),     Value<&ConvCall::silu>("silu"),
};
constexpr Parameters<ConvCall> kConv{"causal_conv1d", kFields};

using Update = ConvUpdateCall;
constexpr Field<Update> kUpdateFields[] = {
    Tensor<&Update::conv, &ConvCall::x>("x"),
    Tensor<&Update::states>("states"),
    Tensor<&Update::conv, &ConvCall::weight>("weight"),
    Tensor<&Update::conv, &ConvCall::out>("out"),
    Optional<&Update::conv, &ConvCall::bias>("bias"),
    Optional<&Update::state_indices>("state_indices"),
    Optional<&Update::has_state>("has_state"),
    Optional<&Update::conv, &ConvCall::cu_seqlens>("cu_seqlens"),
    Value<&Update::conv, &ConvCall::silu>("silu"),
};
constexpr Parameters<Update> kUpdate{"causal_conv1d_update", kUpdateFields};

using Backward = ConvBackwardCall;
constexpr Field<Backward> kBackwardFields[] = {
    Tensor<&Backward::conv, &ConvCall::out>("grad"),
    Tensor<&Backward::conv, &ConvCall::x>("x"),
    Tensor<&Backward::conv, &ConvCall::weight>("weight"),
    Optional<&Backward::conv, &ConvCall::bias>("bias"),
    Optional<&Backward::conv, &ConvCall::cu_seqlens>("cu_seqlens"),
    Tensor<&Backward::dx>("dx"),
    Tensor<&Backward::sums>("sums"),
    Value<&Backward::conv, &ConvCall::silu>("silu"),
};
constexpr Parameters<Backward> kBackward{"causal_conv1d_backward", kBackwardFields};

constexpr PlanField<ConvPlan> kPlanFields[] = {
    Entry<&ConvPlan::kernel>("kernel"),
    Entry<&ConvPlan::rows_per_thread>("rows_per_thread"),
    Entry<&ConvPlan::grid>("grid"),
    Entry<&ConvPlan::block>("block"),
};
constexpr PlanDict<ConvPlan> kPlan{"ConvPlan", kPlanFields};

constexpr Function kFunctions[] = {
    LaunchOf<kConv, causal_conv1d>("causal_conv1d",
                                   "Launches the kernel on the current stream; fills `out`."),
    PlanOf<kConv, causal_conv1d_plan, kPlan>("causal_conv1d_plan"),
    LaunchOf<kUpdate, causal_conv1d_update>(
        "causal_conv1d_update",
        "Launches the kernel on the current stream; fills `out` and replaces `states`."),
    PlanOf<kUpdate, causal_conv1d_update_plan, kPlan>("causal_conv1d_update_plan"),
    LaunchOf<kBackward, causal_conv1d_backward>(
        "causal_conv1d_backward",
        "Launches the kernel on the current stream; fills `dx` and `sums`."),
    PlanOf<kBackward, causal_conv1d_backward_plan, kPlan>("causal_conv1d_backward_plan"),
    LoadOf<causal_conv1d_load>("causal_conv1d_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
