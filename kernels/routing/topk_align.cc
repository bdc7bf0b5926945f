// SPDX-License-Identifier: Apache-2.0
#include "kernels/routing/topk_align.h"

#include <string>

#include "kernels/routing/topk_align_kernels.h"
#include "kernels/routing/topk_route.h"
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

Status prepare(const TopkAlignCall& of, Call* call) {
  const TensorView& scores = *of.scores;
  MoeAlignOptions align = of.align;
  align.num_experts = scores.ndim == 2 ? scores.shape[1] : 1;
  TopkSoftmaxChoice unused;
  TIERCEL_RETURN_IF_ERROR(
      topk_softmax_prepare(kOp, scores, *of.weights, *of.indices, of.topk, &call->topk, &unused));
  const int64_t rows = scores.shape[0], ids = rows * call->topk.k;
  if (rows > kTopkAlignMaxTokens) {
    return Status::Unimplemented(std::string(kOp) + ": one launch takes up to " +
                                 std::to_string(kTopkAlignMaxTokens) + " tokens, got " +
                                 std::to_string(rows));
  }
  TIERCEL_RETURN_IF_ERROR(
      moe_align_check(kOp, {kOp, "scores", scores}, ids, of.expert_map, of.outputs, align));
  call->align = moe_align_args(ids, of.expert_map, of.outputs, align);
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

TopkRouteAlignCall as_route(const TopkAlignCall& call) {
  TopkRouteAlignCall route{call.scores,     nullptr,      call.weights, call.indices,
                           call.expert_map, call.outputs, {},           call.align};
  route.options.softmax = call.topk;
  return route;
}

}  // namespace

Status topk_align_plan(const TopkAlignCall& of, TopkAlignPlan* plan) {
  if (topk_is_large(*of.scores, *of.weights)) return topk_route_align_plan(as_route(of), plan);
  Call call;
  TIERCEL_RETURN_IF_ERROR(prepare(of, &call));
  *plan = {call.kernel->kernel.name(), call.config.cluster.x, call.config.block.x,
           call.config.dynamic_smem};
  return Status();
}

Status topk_align(const TopkAlignCall& of, void* stream) {
  if (topk_is_large(*of.scores, *of.weights)) return topk_route_align(as_route(of), stream);
  Call call;
  TIERCEL_RETURN_IF_ERROR(prepare(of, &call));
  void* pointers[] = {&call.topk, &call.align};
  return call.kernel->kernel.launch(call.config, of.scores->device_index, stream, pointers);
}

}  // namespace tiercel
