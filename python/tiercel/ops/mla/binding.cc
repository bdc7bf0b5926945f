// SPDX-License-Identifier: Apache-2.0
#include "kernels/mla/indexer.h"
#include "kernels/mla/indexer_kernels.h"
#include "kernels/mla/mla_cache_kernels.h"
#include "kernels/mla/mla_cache_write.h"
#include "kernels/mla/mla_decode.h"
#include "kernels/mla/mla_kernels.h"
#include "kernels/mla/mla_sparse.h"
#include "kernels/mla/top_k.h"
#include "kernels/mla/top_k_kernels.h"
#include "python/bindings/functions.h"
#include "python/bindings/workspace.h"

namespace tiercel::python {
namespace {

constexpr char kName[] = "mla_decode";

constexpr Field<MlaDecodeCall> kInputs[] = {
    Tensor<&MlaDecodeCall::q>("q"),
    Tensor<&MlaDecodeCall::kv_cache>("kv_cache"),
    Tensor<&MlaDecodeCall::page_table>("page_table"),
    Tensor<&MlaDecodeCall::seqused_k>("seqused_k"),
    Optional<&MlaDecodeCall::kv_scale>("kv_scale"),
    Tensor<&MlaDecodeCall::out>("out"),
    Optional<&MlaDecodeCall::lse>("lse"),
    Value<&MlaDecodeCall::scale>("scale"),
    Value<&MlaDecodeCall::d_v>("d_v"),
};
constexpr Field<MlaDecodeCall> kWorkspace[] = {
    Optional<&MlaDecodeCall::workspace>("workspace"),
};
constexpr auto kLaunchFields = Joined(kInputs, kWorkspace);
constexpr Parameters<MlaDecodeCall> kRun{kName, kInputs};
constexpr Parameters<MlaDecodeCall> kLaunch{kName, kLaunchFields.fields};

constexpr Field<MlaSparseCall> kSparseInputs[] = {
    Tensor<&MlaSparseCall::q>("q"),
    Tensor<&MlaSparseCall::kv_cache>("kv_cache"),
    Tensor<&MlaSparseCall::indices>("indices"),
    Optional<&MlaSparseCall::kv_scale>("kv_scale"),
    Tensor<&MlaSparseCall::out>("out"),
    Optional<&MlaSparseCall::lse>("lse"),
    Value<&MlaSparseCall::scale>("scale"),
    Value<&MlaSparseCall::d_v>("d_v"),
};
constexpr Field<MlaSparseCall> kSparseWorkspace[] = {
    Optional<&MlaSparseCall::workspace>("workspace"),
};
constexpr auto kSparseLaunchFields = Joined(kSparseInputs, kSparseWorkspace);
constexpr Parameters<MlaSparseCall> kSparseRun{"mla_sparse_attention", kSparseInputs};
constexpr Parameters<MlaSparseCall> kSparseLaunch{"mla_sparse_attention",
                                                  kSparseLaunchFields.fields};

// An operator: gets the workspace itself.
template <const auto& kParameters, typename Launch>
PyObject* Run(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Parsed<kParameters> parsed;
  if (!parsed.Read(values, count)) return nullptr;
  Launch launch;
  const Status status = launch.prepare(parsed.call);
  if (!status.ok()) return Raise(status);
  void* stream = nullptr;
  Workspace workspace;
  if (!parsed.of_stream().CurrentStream(&stream) ||
      (launch.workspace() > 0 &&
       !workspace.Get(values[0], parsed.call.q->device_index, stream, launch.workspace()))) {
    return nullptr;
  }
  const Status launched = WithoutGil([&] { return launch.run(workspace.data(), stream); });
  if (!launched.ok()) return Raise(launched);
  Py_RETURN_NONE;
}

constexpr PlanField<MlaDecodePlan> kPlanFields[] = {
    Entry<&MlaDecodePlan::kernel>("kernel"),
    Entry<&MlaDecodePlan::combine>("combine"),
    Entry<&MlaDecodePlan::rows>("rows"),
    Entry<&MlaDecodePlan::step>("step"),
    Entry<&MlaDecodePlan::copy_rows>("copy_rows"),
    Entry<&MlaDecodePlan::lanes>("lanes"),
    Entry<&MlaDecodePlan::grid>("grid"),
    Entry<&MlaDecodePlan::block>("block"),
    Entry<&MlaDecodePlan::dynamic_smem>("dynamic_smem"),
    Entry<&MlaDecodePlan::workspace>("workspace"),
};
constexpr PlanDict<MlaDecodePlan> kPlan{"MlaDecodePlan", kPlanFields};

constexpr Field<MlaCacheCall> kCacheFields[] = {
    Tensor<&MlaCacheCall::latent>("latent"),
    Tensor<&MlaCacheCall::rotary>("rotary"),
    Tensor<&MlaCacheCall::kv_cache>("kv_cache"),
    Tensor<&MlaCacheCall::slots>("slots"),
    Optional<&MlaCacheCall::kv_scale>("kv_scale"),
    Optional<&MlaCacheCall::positions>("positions"),
    Optional<&MlaCacheCall::angles>("cos_sin_cache"),
    Value<&MlaCacheCall::interleaved>("interleaved"),
};
constexpr Parameters<MlaCacheCall> kCache{"mla_cache_write", kCacheFields};

constexpr PlanField<MlaCachePlan> kCachePlanFields[] = {
    Entry<&MlaCachePlan::kernel>("kernel"),
    Entry<&MlaCachePlan::grid>("grid"),
    Entry<&MlaCachePlan::block>("block"),
};
constexpr PlanDict<MlaCachePlan> kCachePlan{"MlaCachePlan", kCachePlanFields};

constexpr Field<TopKCall> kTopKFields[] = {
    Tensor<&TopKCall::logits>("logits"),
    Optional<&TopKCall::lengths>("lengths"),
    Tensor<&TopKCall::out>("out"),
};
constexpr Parameters<TopKCall> kTopK{"top_k_indices", kTopKFields};

constexpr PlanField<TopKPlan> kTopKPlanFields[] = {
    Entry<&TopKPlan::kernel>("kernel"),
    Entry<&TopKPlan::grid>("grid"),
    Entry<&TopKPlan::block>("block"),
    Entry<&TopKPlan::cluster>("cluster"),
    Entry<&TopKPlan::dynamic_smem>("dynamic_smem"),
};
constexpr PlanDict<TopKPlan> kTopKPlan{"TopKPlan", kTopKPlanFields};

constexpr Field<IndexerCall> kIndexerFields[] = {
    Tensor<&IndexerCall::q>("q"),
    Tensor<&IndexerCall::k>("k"),
    Tensor<&IndexerCall::k_scale>("k_scale"),
    Tensor<&IndexerCall::weights>("weights"),
    Optional<&IndexerCall::starts>("starts"),
    Optional<&IndexerCall::ends>("ends"),
    Tensor<&IndexerCall::out>("out"),
};
constexpr Parameters<IndexerCall> kIndexer{"indexer_logits", kIndexerFields};

constexpr PlanField<IndexerPlan> kIndexerPlanFields[] = {
    Entry<&IndexerPlan::kernel>("kernel"), Entry<&IndexerPlan::grid_x>("grid_x"),
    Entry<&IndexerPlan::grid_y>("grid_y"), Entry<&IndexerPlan::block>("block"),
    Entry<&IndexerPlan::tiles>("tiles"),   Entry<&IndexerPlan::dynamic_smem>("dynamic_smem"),
};
constexpr PlanDict<IndexerPlan> kIndexerPlan{"IndexerPlan", kIndexerPlanFields};

constexpr Function kFunctions[] = {
    LaunchOf<kLaunch, mla_decode>(
        "mla_decode",
        "Launches the kernels on the current stream, fills `out` and, unless it is None, `lse`, "
        "and returns 0. If it needs a workspace and got None, launches nothing and returns its "
        "length in floats."),
    {"mla_decode_run", Run<kRun, MlaDecodeLaunch>,
     "The operator: gets the workspace that it needs, fills `out` and `lse`.", "None",
     Describe<kRun>},
    PlanOf<kRun, mla_decode_plan, kPlan>("mla_decode_plan"),
    LoadOf<mla_decode_kernels, mla_ahead_kernels, mla_combine_kernels>("mla_decode_load"),
    LaunchOf<kSparseLaunch, mla_sparse_attention>(
        "mla_sparse_attention",
        "Launches the kernels on the current stream, fills `out` and, unless it is None, `lse`, "
        "and returns 0. If it needs a workspace and got None, launches nothing and returns its "
        "length in floats."),
    {"mla_sparse_attention_run", Run<kSparseRun, MlaSparseLaunch>,
     "The operator: gets the workspace that it needs, fills `out` and `lse`.", "None",
     Describe<kSparseRun>},
    PlanOf<kSparseRun, mla_sparse_attention_plan, kPlan>("mla_sparse_attention_plan"),
    LoadOf<mla_sparse_kernels, mla_combine_kernels>("mla_sparse_attention_load"),
    LaunchOf<kCache, mla_cache_write>("mla_cache_write",
                                      "Launches the kernel on the current stream; fills rows of "
                                      "`kv_cache`."),
    PlanOf<kCache, mla_cache_write_plan, kCachePlan>("mla_cache_write_plan"),
    LoadOf<mla_cache_kernels>("mla_cache_write_load"),
    LaunchOf<kTopK, top_k_indices>("top_k_indices",
                                   "Launches the kernel on the current stream; fills `out`."),
    PlanOf<kTopK, top_k_indices_plan, kTopKPlan>("top_k_indices_plan"),
    LoadOf<top_k_kernels>("top_k_indices_load"),
    LaunchOf<kIndexer, indexer_logits>("indexer_logits",
                                       "Launches the kernel on the current stream; fills `out`."),
    PlanOf<kIndexer, indexer_logits_plan, kIndexerPlan>("indexer_logits_plan"),
    LoadOf<indexer_kernels>("indexer_logits_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
