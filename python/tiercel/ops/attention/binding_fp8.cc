// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "kernels/attention/fp8/fp8.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

constexpr Field<AttentionFp8Call> kFields[] = {
    Tensor<&AttentionFp8Call::q>("q"),
    Tensor<&AttentionFp8Call::k>("k"),
    Tensor<&AttentionFp8Call::v>("v"),
    Tensor<&AttentionFp8Call::out>("out"),
    Optional<&AttentionFp8Call::lse>("lse"),
    Optional<&AttentionFp8Call::q_descale>("q_descale"),
    Optional<&AttentionFp8Call::k_descale>("k_descale"),
    Optional<&AttentionFp8Call::v_descale>("v_descale"),
    Optional<&AttentionFp8Call::workspace>("workspace"),
    Value<&AttentionFp8Call::options, &AttentionOptions::left>("left"),
    Value<&AttentionFp8Call::options, &AttentionOptions::right>("right"),
    Value<&AttentionFp8Call::options, &AttentionOptions::scale>("scale"),
    Value<&AttentionFp8Call::options, &AttentionOptions::softcap>("softcap"),
};
constexpr Parameters<AttentionFp8Call> kFp8{"attention", kFields};

constexpr Field<AttentionFp8Call> kStarts[] = {
    Tensor<&AttentionFp8Call::starts_q>("cu_seqlens_q"),
    Tensor<&AttentionFp8Call::starts_k>("cu_seqlens_k"),
    Value<&AttentionFp8Call::max_q>("max_seqlen_q"),
    Value<&AttentionFp8Call::max_k>("max_seqlen_k"),
};
constexpr auto kPackedFields = Joined(kFields, kStarts);
constexpr Parameters<AttentionFp8Call> kPacked{"attention_varlen", kPackedFields.fields};

Status CheckWorkspace(const AttentionFp8Call& call) {
  if (call.workspace != nullptr) return Status();
  return Status::TypeError(std::string(call.op()) + ": `workspace` must be a tensor, got None");
}

template <auto kField>
constexpr PlanField<AttentionFp8Plan> OfAttention(const char* name) {
  return Entry<&AttentionFp8Plan::attention, kField>(name);
}

constexpr PlanField<AttentionFp8Plan> kPlanFields[] = {
    OfAttention<&AttentionPlan::kernel>("kernel"),
    OfAttention<&AttentionPlan::tile_m>("tile_m"),
    OfAttention<&AttentionPlan::tile_n>("tile_n"),
    OfAttention<&AttentionPlan::band>("band"),
    OfAttention<&AttentionPlan::grid>("grid"),
    OfAttention<&AttentionPlan::block>("block"),
    OfAttention<&AttentionPlan::dynamic_smem>("dynamic_smem"),
    Entry<&AttentionFp8Plan::workspace>("workspace"),
};
constexpr PlanDict<AttentionFp8Plan> kPlan{"AttentionFp8Plan", kPlanFields};

constexpr Function kFunctions[] = {
    LaunchOf<kFp8, attention_fp8, CheckWorkspace>(
        "attention_fp8",
        "Launches the kernels on the current stream; fills `out` and, unless it is None, `lse`."),
    PlanOf<kFp8, attention_fp8_plan, kPlan>("attention_fp8_plan", kPlanWithoutWorkspace),
    LaunchOf<kPacked, attention_fp8, CheckWorkspace>("attention_varlen_fp8",
                                                     "As attention_fp8, of packed sequences."),
    PlanOf<kPacked, attention_fp8_plan, kPlan>("attention_varlen_fp8_plan", kPlanWithoutWorkspace),
    LoadOf<attention_fp8_load>("attention_fp8_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
