// SPDX-License-Identifier: Apache-2.0
#include "kernels/routing/topk_align.h"

#include <string>

#include "kernels/routing/topk_align_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/kernel_table.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "topk_softmax_align";

struct Call {
  TopkSoftmaxArgs topk;
  MoeAlignArgs align;
  const TopkAlignKernel* kernel = nullptr;
  LaunchConfig config;
};

Status prepare(const TensorView& scores, const TensorView& weights, const TensorView& indices,
               const TensorView* expert_map, const MoeAlignOutputs& outputs,
               const TopkSoftmaxOptions& topk, const MoeAlignOptions& align, Call* call) {
  TopkSoftmaxChoice unused;
  TIERCEL_RETURN_IF_ERROR(
      topk_softmax_prepare(kOp, scores, weights, indices, topk, &call->topk, &unused));
  const int64_t rows = scores.shape[0], ids = rows * call->topk.k;
  if (rows > kTopkAlignMaxTokens) {
    return Status::Unimplemented(std::string(kOp) + ": one launch takes up to " +
                                 std::to_string(kTopkAlignMaxTokens) + " tokens, got " +
                                 std::to_string(rows));
  }
  TIERCEL_RETURN_IF_ERROR(
      moe_align_check(kOp, {kOp, "scores", scores}, ids, expert_map, outputs, align));
  call->align = moe_align_args(ids, expert_map, outputs, align);
  call->align.span = kTopkAlignRows * call->topk.k;

  call->kernel = KernelTable(topk_align_kernels).find([&](const TopkAlignKernel& kernel) {
    return kernel.dtype == scores.dtype && kernel.max_experts >= call->topk.experts;
  });
  unsigned cluster = 1;
  while (cluster * kTopkAlignRows < rows) cluster *= 2;
  call->config.grid.x = cluster;
  call->config.cluster.x = cluster;
  call->config.block.x = kTopkAlignThreads;
  call->config.dynamic_smem =
      moe_align_shared_bytes(call->align.experts, kTopkAlignRows, cluster, call->align.span);
  call->config.dependent = true;
  return Status();
}

}  // namespace

Status topk_align_plan(const TensorView& scores, const TensorView& weights,
                       const TensorView& indices, const TensorView* expert_map,
                       const MoeAlignOutputs& outputs, const TopkSoftmaxOptions& topk,
                       const MoeAlignOptions& align, TopkAlignPlan* plan) {
  Call call;
  TIERCEL_RETURN_IF_ERROR(
      prepare(scores, weights, indices, expert_map, outputs, topk, align, &call));
  *plan = {call.kernel->kernel.name(), call.config.cluster.x, call.config.block.x,
           call.config.dynamic_smem};
  return Status();
}

Status topk_align(const TensorView& scores, const TensorView& weights, const TensorView& indices,
                  const TensorView* expert_map, const MoeAlignOutputs& outputs,
                  const TopkSoftmaxOptions& topk, const MoeAlignOptions& align, void* stream) {
  Call call;
  TIERCEL_RETURN_IF_ERROR(
      prepare(scores, weights, indices, expert_map, outputs, topk, align, &call));
  void* pointers[] = {&call.topk, &call.align};
  return call.kernel->kernel.launch(call.config, scores.device_index, stream, pointers);
}

}  // namespace tiercel
