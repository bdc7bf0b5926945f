// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/paged/kernels.h"
#include "kernels/attention/paged/paged.h"
#include "python/bindings/attention_options.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

const TensorView* QueriesOf(const PagedAttentionCall& call) { return call.q; }

constexpr Field<PagedAttentionCall> kFields[] = {
    Tensor<&PagedAttentionCall::q>("q"),
    Tensor<&PagedAttentionCall::k_cache>("k_cache"),
    Tensor<&PagedAttentionCall::v_cache>("v_cache"),
    Tensor<&PagedAttentionCall::page_table>("page_table"),
    Tensor<&PagedAttentionCall::seqused_k>("seqused_k"),
    Tensor<&PagedAttentionCall::cu_seqlens_q>("cu_seqlens_q"),
    Optional<&PagedAttentionCall::sinks>("sinks"),
    Tensor<&PagedAttentionCall::out>("out"),
    Optional<&PagedAttentionCall::lse>("lse"),
    Read("causal", "bool", ReadCausal<PagedAttentionCall>),
    Read("window", "Sequence[int] | None", ReadWindow<PagedAttentionCall>),
    Read("scale", "float | None", ReadScale<QueriesOf, PagedAttentionCall>),
    ValueOrNone<&PagedAttentionCall::options, &AttentionOptions::softcap>("softcap"),
};
constexpr Parameters<PagedAttentionCall> kPaged{"paged_attention", kFields};

constexpr PlanField<PagedAttentionPlan> kPlanFields[] = {
    Entry<&PagedAttentionPlan::kernel>("kernel"),
    Entry<&PagedAttentionPlan::tile_m>("tile_m"),
    Entry<&PagedAttentionPlan::tile_n>("tile_n"),
    Entry<&PagedAttentionPlan::queries>("queries"),
    Entry<&PagedAttentionPlan::copy_rows>("copy_rows"),
    Entry<&PagedAttentionPlan::grid>("grid"),
    Entry<&PagedAttentionPlan::block>("block"),
    Entry<&PagedAttentionPlan::dynamic_smem>("dynamic_smem"),
};
constexpr PlanDict<PagedAttentionPlan> kPlan{"PagedAttentionPlan", kPlanFields};

constexpr Function kFunctions[] = {
    LaunchOf<kPaged, paged_attention>(
        "paged_attention",
        "Launches the kernel on the current stream; fills `out` and, unless it is None, `lse`."),
    PlanOf<kPaged, paged_attention_plan, kPlan>("paged_attention_plan"),
    LoadOf<attention_paged_kernels>("paged_attention_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
