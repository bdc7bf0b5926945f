// SPDX-License-Identifier: Apache-2.0
#include "kernels/moe/few_tokens.h"
#include "kernels/moe/moe_mlp.h"
#include "python/bindings/functions.h"
#include "python/bindings/tuned.h"

namespace tiercel::python {
namespace {

bool ReadTile(PyObject* object, const char* op, const char*, MoeMlpCall* call) {
  std::array<int, 2> fields;
  if (object == Py_None) return true;
  if (!ReadConfig(object, op, &fields)) return false;
  call->tile = {fields[0], fields[1]};
  return true;
}

// The lists of the routing are None where the kernels are to route topk_ids; `experts` counts those
// of all devices; `up` has no weights.
constexpr Field<MoeMlpCall> kUpFields[] = {
    Tensor<&MoeMlpCall::x>("x"),
    Tensor<&MoeMlpCall::w>("w_up"),
    Optional<&MoeMlpCall::routing, &MoeRouting::sorted_token_ids>("sorted_token_ids"),
    Optional<&MoeMlpCall::routing, &MoeRouting::expert_ids>("expert_ids"),
    Optional<&MoeMlpCall::routing, &MoeRouting::num_tokens_post_padded>("num_tokens_post_padded"),
    Optional<&MoeMlpCall::weights>("weights"),
    Tensor<&MoeMlpCall::out>("out"),
    Value<&MoeMlpCall::routing, &MoeRouting::block_size>("block_size"),
    Index<MoeActivation::kGeluResidual, &MoeMlpCall::activation>("activation"),
    Optional<&MoeMlpCall::ids, &MoeIds::ids>("topk_ids"),
    Value<&MoeMlpCall::ids, &MoeIds::experts>("experts"),
    Optional<&MoeMlpCall::scales, &MoeScales::x>("x_scale"),
    Optional<&MoeMlpCall::scales, &MoeScales::w>("w_scale"),
    MayBeAbsent(Read("config", "tuple[int, int] | None", ReadTile)),
    MayBeAbsent(Optional<&MoeMlpCall::scales, &MoeScales::out>("out_scale")),
};
constexpr Parameters<MoeMlpCall> kUp{"moe_up", kUpFields};

constexpr auto kDownFields = Renamed(kUpFields, 1, "w_down");
constexpr Parameters<MoeMlpCall> kDown{"moe_down", kDownFields.fields};

constexpr PlanField<MoeMlpPlan> kPlanFields[] = {
    Entry<&MoeMlpPlan::kernel>("kernel"), Entry<&MoeMlpPlan::tile_m>("tile_m"),
    Entry<&MoeMlpPlan::tile_n>("tile_n"), Entry<&MoeMlpPlan::cluster>("cluster"),
    Entry<&MoeMlpPlan::tiles>("tiles"),   Entry<&MoeMlpPlan::grid>("grid"),
    Entry<&MoeMlpPlan::block>("block"),   Entry<&MoeMlpPlan::dynamic_smem>("dynamic_smem"),
};
constexpr PlanDict<MoeMlpPlan> kPlan{"MoeMlpPlan", kPlanFields};

constexpr Field<FewTokensCall> kFewFields[] = {
    Tensor<&FewTokensCall::x>("x"),
    Tensor<&FewTokensCall::w_up>("w_up"),
    Tensor<&FewTokensCall::w_down>("w_down"),
    Tensor<&FewTokensCall::w_up_scale>("w_up_scale"),
    Tensor<&FewTokensCall::w_down_scale>("w_down_scale"),
    Tensor<&FewTokensCall::topk_weights>("topk_weights"),
    Tensor<&FewTokensCall::topk_ids>("topk_ids"),
    Tensor<&FewTokensCall::out>("out"),
    Index<MoeActivation::kGeluResidual, &FewTokensCall::activation>("activation"),
};
constexpr Parameters<FewTokensCall> kFew{"fused_moe", kFewFields};

constexpr PlanField<FewTokensPlan> kFewPlanFields[] = {
    Entry<&FewTokensPlan::kernel>("kernel"),
    Entry<&FewTokensPlan::slots>("slots"),
    Entry<&FewTokensPlan::slot_bytes>("slot_bytes"),
    Entry<&FewTokensPlan::grid>("grid"),
    Entry<&FewTokensPlan::block>("block"),
    Entry<&FewTokensPlan::dynamic_smem>("dynamic_smem"),
};
constexpr PlanDict<FewTokensPlan> kFewPlan{"FewTokensPlan", kFewPlanFields};

constexpr char kFills[] = "Launches the kernel on the current stream; fills `out`.";

constexpr Function kFunctions[] = {
    LaunchOf<kUp, moe_up>("moe_up", kFills),
    PlanOf<kUp, moe_up_plan, kPlan>("moe_up_plan"),
    LaunchOf<kDown, moe_down>("moe_down", kFills),
    PlanOf<kDown, moe_down_plan, kPlan>("moe_down_plan"),
    LaunchOf<kFew, fused_moe_few_tokens>("fused_moe_few_tokens", kFills),
    PlanOf<kFew, fused_moe_few_tokens_plan, kFewPlan>("fused_moe_few_tokens_plan"),
    LoadOf<moe_mlp_load, fused_moe_few_tokens_load>("moe_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
