// SPDX-License-Identifier: Apache-2.0
#include "kernels/moe/w4_moe.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

// The lists of the routing are None where each id is a block.
constexpr Field<W4MoeCall> kUpFields[] = {
    Tensor<&W4MoeCall::x>("x"),
    Tensor<&W4MoeCall::weight>("weight"),
    Tensor<&W4MoeCall::scale>("scale"),
    Optional<&W4MoeCall::zero_point>("zero_point"),
    Optional<&W4MoeCall::global_scale>("global_scale"),
    Optional<&W4MoeCall::bias>("bias"),
    Optional<&W4MoeCall::x_scale>("x_scale"),
    Tensor<&W4MoeCall::ids>("ids"),
    Optional<&W4MoeCall::sorted_token_ids>("sorted_token_ids"),
    Optional<&W4MoeCall::expert_ids>("expert_ids"),
    Optional<&W4MoeCall::num_tokens_post_padded>("num_tokens_post_padded"),
    Tensor<&W4MoeCall::out>("out"),
    Value<&W4MoeCall::block_size>("block_size"),
    Value<&W4MoeCall::global_experts>("global_experts"),
    Index<W4Format::kInt4, &W4MoeCall::format>("format"),
    Index<W4MoeActivation::kReluSquared, &W4MoeCall::activation>("activation"),
    Value<&W4MoeCall::interleaved>("interleaved"),
    Value<&W4MoeCall::alpha>("alpha"),
    Value<&W4MoeCall::limit>("limit"),
};
constexpr Parameters<W4MoeCall> kUp{"w4_moe_up", kUpFields};

constexpr auto kDownFields = [] {
  Fields<W4MoeCall, 15> fields{};
  for (size_t i = 0; i < 15; ++i) fields.fields[i] = kUpFields[i];
  return fields;
}();
constexpr Parameters<W4MoeCall> kDown{"w4_moe_down", kDownFields.fields};

constexpr PlanField<W4MoePlan> kPlanFields[] = {
    Entry<&W4MoePlan::kernel>("kernel"), Entry<&W4MoePlan::tokens>("tokens"),
    Entry<&W4MoePlan::rows>("rows"),     Entry<&W4MoePlan::blocks>("blocks"),
    Entry<&W4MoePlan::parts>("parts"),   Entry<&W4MoePlan::grid>("grid"),
    Entry<&W4MoePlan::block>("block"),   Entry<&W4MoePlan::dynamic_smem>("dynamic_smem"),
};
constexpr PlanDict<W4MoePlan> kPlan{"W4MoePlan", kPlanFields};

constexpr char kFills[] = "Launches the kernel on the current stream; fills `out`.";

constexpr Function kFunctions[] = {
    LaunchOf<kUp, w4_moe_up>("w4_moe_up", kFills),
    PlanOf<kUp, w4_moe_up_plan, kPlan>("w4_moe_up_plan"),
    LaunchOf<kDown, w4_moe_down>("w4_moe_down", kFills),
    PlanOf<kDown, w4_moe_down_plan, kPlan>("w4_moe_down_plan"),
    LoadOf<w4_moe_load>("w4_moe_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
