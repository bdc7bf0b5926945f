// SPDX-License-Identifier: Apache-2.0
#include "kernels/routing/moe_align.h"
#include "kernels/routing/moe_align_kernels.h"
#include "kernels/routing/moe_sum.h"
#include "kernels/routing/moe_sum_kernels.h"
#include "kernels/routing/topk_align.h"
#include "kernels/routing/topk_align_kernels.h"
#include "kernels/routing/topk_route.h"
#include "kernels/routing/topk_route_kernels.h"
#include "kernels/routing/topk_softmax.h"
#include "kernels/routing/topk_softmax_kernels.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

constexpr Field<TopkSoftmaxCall> kTopkSoftmaxFields[] = {
    Tensor<&TopkSoftmaxCall::scores>("scores"),
    Tensor<&TopkSoftmaxCall::weights>("weights"),
    Tensor<&TopkSoftmaxCall::indices>("indices"),
    Value<&TopkSoftmaxCall::options, &TopkSoftmaxOptions::softmax_first>("softmax_first"),
    Value<&TopkSoftmaxCall::options, &TopkSoftmaxOptions::renormalize>("renormalize"),
};
constexpr Parameters<TopkSoftmaxCall> kTopkSoftmax{"topk_softmax", kTopkSoftmaxFields};

constexpr PlanField<TopkSoftmaxPlan> kTopkSoftmaxPlanFields[] = {
    Entry<&TopkSoftmaxPlan::kernel>("kernel"),
    Entry<&TopkSoftmaxPlan::rows_per_block>("rows_per_block"),
    Entry<&TopkSoftmaxPlan::lanes_per_row>("lanes_per_row"),
    Entry<&TopkSoftmaxPlan::vector_bytes>("vector_bytes"),
    Entry<&TopkSoftmaxPlan::grid>("grid"),
    Entry<&TopkSoftmaxPlan::block>("block"),
};
constexpr PlanDict<TopkSoftmaxPlan> kTopkSoftmaxPlan{"TopkSoftmaxPlan", kTopkSoftmaxPlanFields};

// An empty batch has outputs all the same: the stream is that of one that is never empty.
constexpr Field<MoeAlignCall> kMoeAlignFields[] = {
    Tensor<&MoeAlignCall::topk_ids>("topk_ids"),
    Optional<&MoeAlignCall::expert_map>("expert_map"),
    Tensor<&MoeAlignCall::outputs, &MoeAlignOutputs::sorted_token_ids>("sorted_token_ids"),
    Tensor<&MoeAlignCall::outputs, &MoeAlignOutputs::expert_ids>("expert_ids"),
    OfStream(Tensor<&MoeAlignCall::outputs, &MoeAlignOutputs::num_tokens_post_padded>(
        "num_tokens_post_padded")),
    Optional<&MoeAlignCall::workspace>("workspace"),
    Value<&MoeAlignCall::options, &MoeAlignOptions::block_size>("block_size"),
    Value<&MoeAlignCall::options, &MoeAlignOptions::num_experts>("num_experts"),
    Value<&MoeAlignCall::options, &MoeAlignOptions::ignore_invalid>("ignore_invalid_experts"),
};
constexpr Parameters<MoeAlignCall> kMoeAlign{"moe_align_block_size", kMoeAlignFields};

constexpr PlanField<MoeAlignPlan> kMoeAlignPlanFields[] = {
    Entry<&MoeAlignPlan::kernel>("kernel"),     Entry<&MoeAlignPlan::items>("items"),
    Entry<&MoeAlignPlan::cluster>("cluster"),   Entry<&MoeAlignPlan::grid>("grid"),
    Entry<&MoeAlignPlan::block>("block"),       Entry<&MoeAlignPlan::dynamic_smem>("dynamic_smem"),
    Entry<&MoeAlignPlan::launches>("launches"),
};
constexpr PlanDict<MoeAlignPlan> kMoeAlignPlan{"MoeAlignPlan", kMoeAlignPlanFields};

struct WorkspaceCall {
  int64_t numel = 0;
  int64_t num_experts = 0;
};
constexpr Field<WorkspaceCall> kWorkspaceFields[] = {
    Value<&WorkspaceCall::numel>("numel"),
    Value<&WorkspaceCall::num_experts>("num_experts"),
};
constexpr Parameters<WorkspaceCall> kWorkspace{"moe_align_block_size", kWorkspaceFields};

PyObject* WorkspaceElements(const WorkspaceCall& call) {
  return PyLong_FromLongLong(moe_align_workspace(call.numel, call.num_experts));
}

constexpr Field<MoeSumCall> kMoeSumFields[] = {
    Tensor<&MoeSumCall::x>("x"),
    Optional<&MoeSumCall::weights>("weights"),
    OfStream(Tensor<&MoeSumCall::out>("out")),
};
constexpr Parameters<MoeSumCall> kMoeSum{"moe_sum", kMoeSumFields};

constexpr PlanField<MoeSumPlan> kMoeSumPlanFields[] = {
    Entry<&MoeSumPlan::kernel>("kernel"),
    Entry<&MoeSumPlan::vector_bytes>("vector_bytes"),
    Pair<&MoeSumPlan::grid_x, &MoeSumPlan::grid_y>("grid"),
    Pair<&MoeSumPlan::block_x, &MoeSumPlan::block_y>("block"),
};
constexpr PlanDict<MoeSumPlan> kMoeSumPlan{"MoeSumPlan", kMoeSumPlanFields};

constexpr Field<TopkAlignCall> kTopkAlignFields[] = {
    Tensor<&TopkAlignCall::scores>("scores"),
    Tensor<&TopkAlignCall::weights>("weights"),
    Tensor<&TopkAlignCall::indices>("indices"),
    Optional<&TopkAlignCall::expert_map>("expert_map"),
    Tensor<&TopkAlignCall::outputs, &MoeAlignOutputs::sorted_token_ids>("sorted_token_ids"),
    Tensor<&TopkAlignCall::outputs, &MoeAlignOutputs::expert_ids>("expert_ids"),
    OfStream(Tensor<&TopkAlignCall::outputs, &MoeAlignOutputs::num_tokens_post_padded>(
        "num_tokens_post_padded")),
    Value<&TopkAlignCall::align, &MoeAlignOptions::block_size>("block_size"),
    Value<&TopkAlignCall::topk, &TopkSoftmaxOptions::softmax_first>("softmax_first"),
    Value<&TopkAlignCall::topk, &TopkSoftmaxOptions::renormalize>("renormalize"),
    Value<&TopkAlignCall::align, &MoeAlignOptions::ignore_invalid>("ignore_invalid_experts"),
};
constexpr Parameters<TopkAlignCall> kTopkAlign{"topk_softmax_align", kTopkAlignFields};

constexpr PlanField<TopkAlignPlan> kTopkAlignPlanFields[] = {
    Entry<&TopkAlignPlan::kernel>("kernel"),
    Entry<&TopkAlignPlan::cluster>("cluster"),
    Entry<&TopkAlignPlan::block>("block"),
    Entry<&TopkAlignPlan::dynamic_smem>("dynamic_smem"),
};
constexpr PlanDict<TopkAlignPlan> kTopkAlignPlan{"TopkAlignPlan", kTopkAlignPlanFields};

constexpr Field<TopkRouteCall> kTopkRouteFields[] = {
    Tensor<&TopkRouteCall::scores>("scores"),
    Optional<&TopkRouteCall::bias>("correction_bias"),
    Tensor<&TopkRouteCall::weights>("weights"),
    Tensor<&TopkRouteCall::indices>("indices"),
    Value<&TopkRouteCall::options, &TopkRouteOptions::softmax, &TopkSoftmaxOptions::softmax_first>(
        "softmax_first"),
    Value<&TopkRouteCall::options, &TopkRouteOptions::softmax, &TopkSoftmaxOptions::renormalize>(
        "renormalize"),
    Index<TopkScoring::kSqrtSoftplus, &TopkRouteCall::options, &TopkRouteOptions::scoring>(
        "scoring"),
    Value<&TopkRouteCall::options, &TopkRouteOptions::groups>("n_group"),
    Value<&TopkRouteCall::options, &TopkRouteOptions::kept_groups>("topk_group"),
    Value<&TopkRouteCall::options, &TopkRouteOptions::scaling>("scaling_factor"),
    Value<&TopkRouteCall::options, &TopkRouteOptions::shared>("n_shared"),
    Optional<&TopkRouteCall::token_ids>("token_ids"),
    Optional<&TopkRouteCall::expert_table>("expert_table"),
};
constexpr Parameters<TopkRouteCall> kTopkRoute{"topk_softmax", kTopkRouteFields};

constexpr Field<TopkRouteAlignCall> kTopkRouteAlignFields[] = {
    Tensor<&TopkRouteAlignCall::scores>("scores"),
    Optional<&TopkRouteAlignCall::bias>("correction_bias"),
    Tensor<&TopkRouteAlignCall::weights>("weights"),
    Tensor<&TopkRouteAlignCall::indices>("indices"),
    Optional<&TopkRouteAlignCall::expert_map>("expert_map"),
    Tensor<&TopkRouteAlignCall::outputs, &MoeAlignOutputs::sorted_token_ids>("sorted_token_ids"),
    Tensor<&TopkRouteAlignCall::outputs, &MoeAlignOutputs::expert_ids>("expert_ids"),
    OfStream(Tensor<&TopkRouteAlignCall::outputs, &MoeAlignOutputs::num_tokens_post_padded>(
        "num_tokens_post_padded")),
    Value<&TopkRouteAlignCall::align, &MoeAlignOptions::block_size>("block_size"),
    Value<&TopkRouteAlignCall::options, &TopkRouteOptions::softmax,
          &TopkSoftmaxOptions::softmax_first>("softmax_first"),
    Value<&TopkRouteAlignCall::options, &TopkRouteOptions::softmax,
          &TopkSoftmaxOptions::renormalize>("renormalize"),
    Value<&TopkRouteAlignCall::align, &MoeAlignOptions::ignore_invalid>("ignore_invalid_experts"),
    Index<TopkScoring::kSqrtSoftplus, &TopkRouteAlignCall::options, &TopkRouteOptions::scoring>(
        "scoring"),
    Value<&TopkRouteAlignCall::options, &TopkRouteOptions::groups>("n_group"),
    Value<&TopkRouteAlignCall::options, &TopkRouteOptions::kept_groups>("topk_group"),
    Value<&TopkRouteAlignCall::options, &TopkRouteOptions::scaling>("scaling_factor"),
    Value<&TopkRouteAlignCall::options, &TopkRouteOptions::shared>("n_shared"),
    Optional<&TopkRouteAlignCall::token_ids>("token_ids"),
    Optional<&TopkRouteAlignCall::expert_table>("expert_table"),
};
constexpr Parameters<TopkRouteAlignCall> kTopkRouteAlign{"topk_softmax_align",
                                                         kTopkRouteAlignFields};

constexpr char kFills[] = "Launches the kernel on the current stream; fills the outputs.";

constexpr Function kFunctions[] = {
    LaunchOf<kTopkSoftmax, topk_softmax>(
        "topk_softmax",
        "Launches the kernel on the current stream; fills `weights` and `indices`."),
    PlanOf<kTopkSoftmax, topk_softmax_plan, kTopkSoftmaxPlan>("topk_softmax_plan"),
    LoadOf<topk_softmax_kernels>("topk_softmax_load"),
    LaunchOf<kMoeAlign, moe_align>("moe_align_block_size", kFills),
    PlanOf<kMoeAlign, moe_align_plan, kMoeAlignPlan>("moe_align_block_size_plan"),
    FunctionOf<kWorkspace, WorkspaceElements>(
        "moe_align_block_size_workspace", "int",
        "The int32 elements of workspace that a call needs, or 0."),
    LoadOf<moe_align_small_kernels, moe_align_count_kernel, moe_align_store_kernels>(
        "moe_align_block_size_load"),
    LaunchOf<kMoeSum, moe_sum>("moe_sum", kFills),
    PlanOf<kMoeSum, moe_sum_plan, kMoeSumPlan>("moe_sum_plan"),
    LoadOf<moe_sum_kernels>("moe_sum_load"),
    LaunchOf<kTopkAlign, topk_align>("topk_softmax_align", kFills),
    PlanOf<kTopkAlign, topk_align_plan, kTopkAlignPlan>("topk_softmax_align_plan"),
    LoadOf<topk_align_kernels>("topk_softmax_align_load"),
    LaunchOf<kTopkRoute, topk_route>("topk_route", kFills),
    PlanOf<kTopkRoute, topk_route_plan, kTopkSoftmaxPlan>("topk_route_plan"),
    LoadOf<topk_route_kernels, hash_route_kernels>("topk_route_load"),
    LaunchOf<kTopkRouteAlign, topk_route_align>("topk_route_align", kFills),
    PlanOf<kTopkRouteAlign, topk_route_align_plan, kTopkAlignPlan>("topk_route_align_plan"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
