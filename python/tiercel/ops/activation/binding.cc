// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "kernels/activation/activation.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

template <typename Call>
const char* OpName(const Call& call) {
  return activation_op_name(call.function, call.gated);
}

constexpr Field<ActivationCall> kForwardFields[] = {
    Tensor<&ActivationCall::x>("x"),
    Optional<&ActivationCall::up>("up"),
    Optional<&ActivationCall::scale>("scale"),
    Tensor<&ActivationCall::out>("out"),
    Index<ActivationFunction::kRelu, &ActivationCall::function>("function"),
    Value<&ActivationCall::gated>("gated"),
};
constexpr Parameters<ActivationCall> kForward{
    "activation", kForwardFields, {}, OpName<ActivationCall>};

constexpr Field<ActivationBackwardCall> kBackwardFields[] = {
    Tensor<&ActivationBackwardCall::grad>("grad"),
    OfStream(Tensor<&ActivationBackwardCall::x>("x")),
    Optional<&ActivationBackwardCall::up>("up"),
    Tensor<&ActivationBackwardCall::x_grad>("x_grad"),
    Optional<&ActivationBackwardCall::up_grad>("up_grad"),
    Optional<&ActivationBackwardCall::out>("out"),
    Index<ActivationFunction::kRelu, &ActivationBackwardCall::function>("function"),
    Value<&ActivationBackwardCall::gated>("gated"),
};
constexpr Parameters<ActivationBackwardCall> kBackward{
    "activation_backward", kBackwardFields, {}, OpName<ActivationBackwardCall>};

Status CheckTogether(const ActivationBackwardCall& call) {
  if ((call.up == nullptr) == (call.up_grad == nullptr)) return Status();
  return Status::InvalidArgument(std::string(OpName(call)) +
                                 ": `up` and `up_grad` must come together");
}

Status BackwardPlan(const ActivationBackwardCall& call, ActivationPlan* plan) {
  TIERCEL_RETURN_IF_ERROR(CheckTogether(call));
  return activation_backward_plan(call, plan);
}

constexpr PlanField<ActivationPlan> kPlanFields[] = {
    Entry<&ActivationPlan::kernel>("kernel"),   Entry<&ActivationPlan::rows>("rows"),
    Entry<&ActivationPlan::columns>("columns"), Entry<&ActivationPlan::aligned>("aligned"),
    Entry<&ActivationPlan::grid>("grid"),       Entry<&ActivationPlan::block>("block"),
};
constexpr PlanDict<ActivationPlan> kPlan{"ActivationPlan", kPlanFields};

struct LoadCall {
  int64_t device = 0;
  ActivationFunction function = ActivationFunction::kSilu;
  bool gated = false;
};
constexpr Field<LoadCall> kLoadFields[] = {
    Value<&LoadCall::device>("device"),
    Index<ActivationFunction::kRelu, &LoadCall::function>("function"),
    Value<&LoadCall::gated>("gated"),
};
constexpr Parameters<LoadCall> kLoad{"activation_load", kLoadFields};

PyObject* LoadFunction(const LoadCall& call) {
  const Status status = WithoutGil(
      [&] { return activation_load(call.function, call.gated, static_cast<int>(call.device)); });
  if (!status.ok()) return Raise(status);
  Py_RETURN_NONE;
}

constexpr Function kFunctions[] = {
    LaunchOf<kForward, activation>(
        "activation",
        "Launches the kernel on the current stream; fills `out`. `function` is its index."),
    PlanOf<kForward, activation_plan, kPlan>("activation_plan"),
    LaunchOf<kBackward, activation_backward, CheckTogether>(
        "activation_backward",
        "Launches the kernel on the current stream; fills `x_grad`, `up_grad` and `out`."),
    PlanOf<kBackward, BackwardPlan, kPlan>("activation_backward_plan"),
    FunctionOf<kLoad, LoadFunction>("activation_load", "None",
                                    "Loads a function's kernels on a CUDA device, by its index."),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
