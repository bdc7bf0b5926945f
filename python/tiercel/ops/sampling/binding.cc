// SPDX-License-Identifier: Apache-2.0
#include "kernels/sampling/sample.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

constexpr Field<SampleCall> kFields[] = {
    Tensor<&SampleCall::logits>("logits"),
    Optional<&SampleCall::temperatures>("temperatures"),
    Optional<&SampleCall::top_ks>("top_ks"),
    Optional<&SampleCall::top_ps>("top_ps"),
    Optional<&SampleCall::min_ps>("min_ps"),
    Optional<&SampleCall::seeds>("seeds"),
    Optional<&SampleCall::offsets>("offsets"),
    Optional<&SampleCall::repetition_penalties>("repetition_penalties"),
    Optional<&SampleCall::presence_penalties>("presence_penalties"),
    Optional<&SampleCall::frequency_penalties>("frequency_penalties"),
    Optional<&SampleCall::counts>("counts"),
    Optional<&SampleCall::prompt>("prompt"),
    Optional<&SampleCall::allowed>("allowed"),
    Tensor<&SampleCall::tokens>("tokens"),
    Optional<&SampleCall::logprobs>("logprobs"),
    Value<&SampleCall::numbers, &SampleNumbers::temperature>("temperature"),
    Value<&SampleCall::numbers, &SampleNumbers::top_k>("top_k"),
    Value<&SampleCall::numbers, &SampleNumbers::top_p>("top_p"),
    Value<&SampleCall::numbers, &SampleNumbers::min_p>("min_p"),
    Value<&SampleCall::numbers, &SampleNumbers::seed>("seed"),
    Value<&SampleCall::numbers, &SampleNumbers::offset>("offset"),
    Value<&SampleCall::numbers, &SampleNumbers::repetition>("repetition_penalty"),
    Value<&SampleCall::numbers, &SampleNumbers::presence>("presence_penalty"),
    Value<&SampleCall::numbers, &SampleNumbers::frequency>("frequency_penalty"),
};
constexpr Parameters<SampleCall> kSample{"sample", kFields};

constexpr PlanField<SamplePlan> kPlanFields[] = {
    Entry<&SamplePlan::kernel>("kernel"),
    Entry<&SamplePlan::blocks_per_row>("blocks_per_row"),
    Entry<&SamplePlan::grid>("grid"),
    Entry<&SamplePlan::block>("block"),
    Entry<&SamplePlan::dynamic_smem>("dynamic_smem"),
};
constexpr PlanDict<SamplePlan> kPlan{"SamplePlan", kPlanFields};

constexpr Function kFunctions[] = {
    LaunchOf<kSample, sample>(
        "sample", "Launches the kernel on the current stream; fills `tokens` and `logprobs`."),
    PlanOf<kSample, sample_plan, kPlan>("sample_plan"),
    LoadOf<sample_load>("sample_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
