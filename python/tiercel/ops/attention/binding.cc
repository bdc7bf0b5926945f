// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/forward/forward.h"
#include "kernels/attention/forward/kernels.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

constexpr Field<AttentionCall> kFields[] = {
    Tensor<&AttentionCall::q>("q"),
    Tensor<&AttentionCall::k>("k"),
    Tensor<&AttentionCall::v>("v"),
    Tensor<&AttentionCall::out>("out"),
    Optional<&AttentionCall::lse>("lse"),
    Value<&AttentionCall::options, &AttentionOptions::left>("left"),
    Value<&AttentionCall::options, &AttentionOptions::right>("right"),
    Value<&AttentionCall::options, &AttentionOptions::scale>("scale"),
    Value<&AttentionCall::options, &AttentionOptions::softcap>("softcap"),
    MayBeAbsent(Optional<&AttentionCall::sinks>("sinks")),
};
constexpr Parameters<AttentionCall> kAttention{"attention", kFields};

constexpr Field<PackedAttention> kPackedFields[] = {
    Tensor<&PackedAttention::q>("q"),
    Tensor<&PackedAttention::k>("k"),
    Tensor<&PackedAttention::v>("v"),
    Tensor<&PackedAttention::starts_q>("cu_seqlens_q"),
    Tensor<&PackedAttention::starts_k>("cu_seqlens_k"),
    Tensor<&PackedAttention::out>("out"),
    Optional<&PackedAttention::lse>("lse"),
    Value<&PackedAttention::max_q>("max_seqlen_q"),
    Value<&PackedAttention::max_k>("max_seqlen_k"),
    Value<&PackedAttention::options, &AttentionOptions::left>("left"),
    Value<&PackedAttention::options, &AttentionOptions::right>("right"),
    Value<&PackedAttention::options, &AttentionOptions::scale>("scale"),
    Value<&PackedAttention::options, &AttentionOptions::softcap>("softcap"),
    MayBeAbsent(Optional<&PackedAttention::sinks>("sinks")),
};
constexpr Parameters<PackedAttention> kPacked{"attention_varlen", kPackedFields};

constexpr PlanField<AttentionPlan> kPlanFields[] = {
    Entry<&AttentionPlan::kernel>("kernel"),
    Entry<&AttentionPlan::tile_m>("tile_m"),
    Entry<&AttentionPlan::tile_n>("tile_n"),
    Entry<&AttentionPlan::band>("band"),
    Entry<&AttentionPlan::grid>("grid"),
    Entry<&AttentionPlan::block>("block"),
    Entry<&AttentionPlan::dynamic_smem>("dynamic_smem"),
};
constexpr PlanDict<AttentionPlan> kPlan{"AttentionPlan", kPlanFields};

constexpr Function kFunctions[] = {
    LaunchOf<kAttention, attention>(
        "attention",
        "Launches the kernel on the current stream; fills `out` and, unless it is None, `lse`."),
    PlanOf<kAttention, attention_plan, kPlan>("attention_plan"),
    LaunchOf<kPacked, attention_varlen>(
        "attention_varlen", "Attention of packed sequences; fills `out` and, unless None, `lse`."),
    PlanOf<kPacked, attention_varlen_plan, kPlan>("attention_varlen_plan"),
    LoadOf<attention_kernels>("attention_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
