// SPDX-License-Identifier: Apache-2.0
#include "kernels/softmax/softmax.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

template <typename Call>
const char* OpName(const Call& call) {
  return call.log ? "log_softmax" : "softmax_online";
}

constexpr Field<SoftmaxCall> kForwardFields[] = {
    Tensor<&SoftmaxCall::x>("x"),     Optional<&SoftmaxCall::mask>("mask"),
    Tensor<&SoftmaxCall::out>("out"), ValueOrNone<&SoftmaxCall::scale>("scale"),
    Value<&SoftmaxCall::log>("log"),
};
constexpr Parameters<SoftmaxCall> kForward{"softmax", kForwardFields, {}, OpName<SoftmaxCall>};

constexpr Field<SoftmaxBackwardCall> kBackwardFields[] = {
    Tensor<&SoftmaxBackwardCall::grad>("grad"),
    OfStream(Tensor<&SoftmaxBackwardCall::y>("y")),
    Optional<&SoftmaxBackwardCall::mask>("mask"),
    Tensor<&SoftmaxBackwardCall::x_grad>("x_grad"),
    ValueOrNone<&SoftmaxBackwardCall::scale>("scale"),
    Value<&SoftmaxBackwardCall::log>("log"),
};
constexpr Parameters<SoftmaxBackwardCall> kBackward{
    "softmax_backward", kBackwardFields, {}, OpName<SoftmaxBackwardCall>};

constexpr PlanField<SoftmaxPlan> kPlanFields[] = {
    Entry<&SoftmaxPlan::kernel>("kernel"),
    Entry<&SoftmaxPlan::threads_per_row>("threads_per_row"),
    Entry<&SoftmaxPlan::blocks_per_row>("blocks_per_row"),
    Entry<&SoftmaxPlan::vectors>("vectors"),
    Entry<&SoftmaxPlan::grid>("grid"),
    Entry<&SoftmaxPlan::block>("block"),
};
constexpr PlanDict<SoftmaxPlan> kPlan{"SoftmaxPlan", kPlanFields};

constexpr Function kFunctions[] = {
    LaunchOf<kForward, softmax>("softmax",
                                "Launches the kernel on the current stream; fills `out`."),
    PlanOf<kForward, softmax_plan, kPlan>("softmax_plan"),
    LaunchOf<kBackward, softmax_backward>(
        "softmax_backward", "Launches the kernel on the current stream; fills `x_grad`."),
    PlanOf<kBackward, softmax_backward_plan, kPlan>("softmax_backward_plan"),
    LoadOf<softmax_load>("softmax_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
