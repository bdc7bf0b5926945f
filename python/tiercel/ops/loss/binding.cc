// SPDX-License-Identifier: Apache-2.0
#include "kernels/loss/cross_entropy.h"
#include "kernels/loss/target_rows.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

constexpr Field<CrossEntropyCall> kFields[] = {
    Tensor<&CrossEntropyCall::logits>("logits"),
    Tensor<&CrossEntropyCall::target>("target"),
    Optional<&CrossEntropyCall::weight>("weight"),
    Optional<&CrossEntropyCall::scale>("scale"),
    Tensor<&CrossEntropyCall::loss>("loss"),
    Optional<&CrossEntropyCall::grad>("grad"),
    Value<&CrossEntropyCall::options, &CrossEntropyOptions::ignore_index>("ignore_index"),
    Value<&CrossEntropyCall::options, &CrossEntropyOptions::label_smoothing>("label_smoothing"),
    Value<&CrossEntropyCall::options, &CrossEntropyOptions::z_loss>("z_loss"),
    ValueOrNone<&CrossEntropyCall::options, &CrossEntropyOptions::softcap>("softcap"),
};
constexpr Parameters<CrossEntropyCall> kCrossEntropy{"cross_entropy", kFields};

// The fields of cross_entropy, and the entropy of each row.
constexpr Field<CrossEntropyCall> kEntropyFields[] = {
    Tensor<&CrossEntropyCall::logits>("logits"),
    Tensor<&CrossEntropyCall::target>("target"),
    Optional<&CrossEntropyCall::weight>("weight"),
    Optional<&CrossEntropyCall::scale>("scale"),
    Tensor<&CrossEntropyCall::loss>("loss"),
    Optional<&CrossEntropyCall::grad>("grad"),
    Value<&CrossEntropyCall::options, &CrossEntropyOptions::ignore_index>("ignore_index"),
    Value<&CrossEntropyCall::options, &CrossEntropyOptions::label_smoothing>("label_smoothing"),
    Value<&CrossEntropyCall::options, &CrossEntropyOptions::z_loss>("z_loss"),
    ValueOrNone<&CrossEntropyCall::options, &CrossEntropyOptions::softcap>("softcap"),
    Tensor<&CrossEntropyCall::entropy>("entropy"),
    Optional<&CrossEntropyCall::entropy_scale>("entropy_scale"),
};
constexpr Parameters<CrossEntropyCall> kEntropy{"cross_entropy", kEntropyFields};

constexpr Field<CrossEntropyScaleCall> kScaleFields[] = {
    Tensor<&CrossEntropyScaleCall::target>("target"),
    Optional<&CrossEntropyScaleCall::weight>("weight"),
    Tensor<&CrossEntropyScaleCall::scale>("scale"),
    Value<&CrossEntropyScaleCall::ignore_index>("ignore_index"),
};
constexpr Parameters<CrossEntropyScaleCall> kScale{"cross_entropy", kScaleFields};

constexpr Field<CrossEntropyRescaleCall> kRescaleFields[] = {
    Tensor<&CrossEntropyRescaleCall::grad>("grad"),
    Tensor<&CrossEntropyRescaleCall::factor>("factor"),
};
constexpr Parameters<CrossEntropyRescaleCall> kRescale{"cross_entropy", kRescaleFields};

constexpr PlanField<CrossEntropyPlan> kPlanFields[] = {
    Entry<&CrossEntropyPlan::kernel>("kernel"),
    Entry<&CrossEntropyPlan::blocks_per_row>("blocks_per_row"),
    Entry<&CrossEntropyPlan::grid>("grid"),
    Entry<&CrossEntropyPlan::block>("block"),
    Entry<&CrossEntropyPlan::dynamic_smem>("dynamic_smem"),
};
constexpr PlanDict<CrossEntropyPlan> kPlan{"CrossEntropyPlan", kPlanFields};

constexpr Field<TargetRowsCall> kTargetRowsFields[] = {
    Tensor<&TargetRowsCall::sums>("sums"),     Tensor<&TargetRowsCall::x>("x"),
    Tensor<&TargetRowsCall::target>("target"), Tensor<&TargetRowsCall::order>("order"),
    Tensor<&TargetRowsCall::by>("by"),
};
constexpr Parameters<TargetRowsCall> kTargetRows{"linear_cross_entropy", kTargetRowsFields};

constexpr PlanField<TargetRowsPlan> kTargetRowsPlanFields[] = {
    Entry<&TargetRowsPlan::kernel>("kernel"),
    Entry<&TargetRowsPlan::grid>("grid"),
    Entry<&TargetRowsPlan::parts>("parts"),
    Entry<&TargetRowsPlan::block>("block"),
};
constexpr PlanDict<TargetRowsPlan> kTargetRowsPlan{"TargetRowsPlan", kTargetRowsPlanFields};

constexpr Function kFunctions[] = {
    LaunchOf<kCrossEntropy, cross_entropy>(
        "cross_entropy", "Launches the kernel on the current stream; fills `loss` and `grad`."),
    PlanOf<kCrossEntropy, cross_entropy_plan, kPlan>("cross_entropy_plan"),
    LaunchOf<kEntropy, cross_entropy>(
        "cross_entropy_and_entropy",
        "Launches the kernel on the current stream; fills `loss`, `grad` and `entropy`."),
    PlanOf<kEntropy, cross_entropy_plan, kPlan>("cross_entropy_and_entropy_plan"),
    LaunchOf<kScale, cross_entropy_mean_scale>(
        "cross_entropy_mean_scale",
        "Launches the kernel that fills `scale` with what a mean multiplies by."),
    PlanOf<kScale, cross_entropy_mean_scale_plan, kPlan>("cross_entropy_mean_scale_plan"),
    LaunchOf<kRescale, cross_entropy_rescale>(
        "cross_entropy_rescale", "Launches the kernel that multiplies `grad` by `factor`."),
    LoadOf<cross_entropy_load>("cross_entropy_load"),
    LaunchOf<kTargetRows, target_rows>(
        "target_rows", "Launches the kernel that adds what tokens add at their targets to `sums`."),
    PlanOf<kTargetRows, target_rows_plan, kTargetRowsPlan>("target_rows_plan"),
    LoadOf<target_rows_load>("target_rows_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
