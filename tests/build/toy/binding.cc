// SPDX-License-Identifier: Apache-2.0
#include "kernels/toy/toy.h"
#include "kernels/toy/toy_kernels.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

constexpr Field<ToyShiftCall> kFields[] = {
    Tensor<&ToyShiftCall::x>("x"),
    Tensor<&ToyShiftCall::out>("out"),
    Value<&ToyShiftCall::amount>("amount"),
};
constexpr Parameters<ToyShiftCall> kToyShift{"toy_shift", kFields};

constexpr PlanField<ToyShiftPlan> kPlanFields[] = {
    Entry<&ToyShiftPlan::kernel>("kernel"),
    Entry<&ToyShiftPlan::grid>("grid"),
    Entry<&ToyShiftPlan::block>("block"),
};
constexpr PlanDict<ToyShiftPlan> kPlan{"ToyShiftPlan", kPlanFields};

constexpr Function kFunctions[] = {
    LaunchOf<kToyShift, toy_shift>("toy_shift",
                                   "Launches the kernel on the current stream; fills `out`."),
    PlanOf<kToyShift, toy_shift_plan, kPlan>("toy_shift_plan"),
    LoadOf<toy_shift_kernels>("toy_shift_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
