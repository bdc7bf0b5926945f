// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/paged/kernels.h"
#include "kernels/attention/paged/paged.h"
#include "kernels/attention/paged/queries.h"
#include "python/bindings/attention_options.h"
#include "python/bindings/functions.h"
#include "python/bindings/workspace.h"

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
    Value<&PagedAttentionCall::max_q>("max_seqlen_q"),
    Optional<&PagedAttentionCall::k_scale>("k_scale"),
    Optional<&PagedAttentionCall::v_scale>("v_scale"),
    Tensor<&PagedAttentionCall::out>("out"),
    Optional<&PagedAttentionCall::lse>("lse"),
    Read("causal", "bool", ReadCausal<PagedAttentionCall>),
    Read("window", "Sequence[int] | None", ReadWindow<PagedAttentionCall>),
    Read("scale", "float | None", ReadScale<QueriesOf, PagedAttentionCall>),
    ValueOrNone<&PagedAttentionCall::options, &AttentionOptions::softcap>("softcap"),
    ValueOrNone<&PagedAttentionCall::max_keys>("max_seqused_k"),
    MayBeAbsent(Optional<&PagedAttentionCall::tree>("tree_mask")),
    MayBeAbsent(Optional<&PagedAttentionCall::prefix>("prefix")),
    MayBeAbsent(Optional<&PagedAttentionCall::q_scale>("q_scale")),
    MayBeAbsent(Optional<&PagedAttentionCall::workspace>("workspace")),
};
constexpr Parameters<PagedAttentionCall> kPaged{"paged_attention", kFields};

PyObject* Run(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Parsed<kPaged> parsed;
  if (!parsed.Read(values, count)) return nullptr;
  const PagedAttentionCall& call = parsed.call;
  PagedQueriesLaunch launch;
  if (const Status status = launch.prepare(call); !status.ok()) return Raise(status);
  void* stream = nullptr;
  if (!parsed.of_stream().CurrentStream(&stream)) return nullptr;
  Workspace allocated;
  float* workspace = nullptr;
  if (call.workspace != nullptr) {
    const Status status = paged_attention_check_workspace(call, launch.workspace());
    if (!status.ok()) return Raise(status);
    workspace = static_cast<float*>(call.workspace->data);
  } else if (launch.workspace() > 0) {
    if (!allocated.Get(values[0], call.q->device_index, stream, launch.workspace())) return nullptr;
    workspace = allocated.data();
  }
  const Status launched = WithoutGil([&] { return launch.run(workspace, stream); });
  if (!launched.ok()) return Raise(launched);
  Py_RETURN_NONE;
}

constexpr PlanField<PagedAttentionPlan> kPlanFields[] = {
    Entry<&PagedAttentionPlan::kernel>("kernel"),
    Entry<&PagedAttentionPlan::combine>("combine"),
    Entry<&PagedAttentionPlan::widen>("widen"),
    Entry<&PagedAttentionPlan::convert>("convert"),
    Entry<&PagedAttentionPlan::decode>("decode"),
    Entry<&PagedAttentionPlan::tile_m>("tile_m"),
    Entry<&PagedAttentionPlan::tile_n>("tile_n"),
    Entry<&PagedAttentionPlan::queries>("queries"),
    Entry<&PagedAttentionPlan::copy_rows>("copy_rows"),
    Entry<&PagedAttentionPlan::parts>("parts"),
    Entry<&PagedAttentionPlan::grid>("grid"),
    Entry<&PagedAttentionPlan::block>("block"),
    Entry<&PagedAttentionPlan::dynamic_smem>("dynamic_smem"),
    Entry<&PagedAttentionPlan::workspace>("workspace"),
};
constexpr PlanDict<PagedAttentionPlan> kPlan{"PagedAttentionPlan", kPlanFields};

constexpr Function kFunctions[] = {
    {"paged_attention", Run,
     "Launches the kernels on the current stream; fills `out` and, unless it is None, `lse`. "
     "Allocates the workspace that the plan tells of, unless it is given.",
     "None", Describe<kPaged>},
    PlanOf<kPaged, paged_attention_plan, kPlan>("paged_attention_plan"),
    LoadOf<attention_paged_kernels, paged_combine_kernels, paged_wide_kernels, paged_widen_kernels,
           paged_mixed_kernels, paged_queries_kernels, decode_kernels_bf16, decode_kernels_bf16_fp8,
           decode_kernels_fp16, decode_kernels_fp16_fp8, decode_combine_kernels>(
        "paged_attention_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
