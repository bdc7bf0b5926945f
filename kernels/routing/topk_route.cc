// SPDX-License-Identifier: Apache-2.0
#include "kernels/routing/topk_route.h"

#include <algorithm>
#include <string>

#include "kernels/routing/topk_route_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "topk_softmax";
constexpr char kAlignOp[] = "topk_softmax_align";

std::string text(int64_t value) { return std::to_string(value); }

Status wrong(const char* op, const std::string& what) {
  return Status::InvalidArgument(std::string(op) + ": " + what);
}

Status check_options(const char* op, int64_t experts, int64_t k, const TopkRouteOptions& options) {
  if (options.shared < 0) {
    return wrong(op, "`n_shared` must be at least 0, got " + text(options.shared));
  }
  if (options.groups < 1 || experts % options.groups != 0) {
    return wrong(op, "`n_group` must divide the number of experts, got " + text(options.groups) +
                         " for " + text(experts) + " experts");
  }
  if (options.kept_groups < 1 || options.kept_groups > options.groups) {
    return wrong(op, "`topk_group` must be between 1 and `n_group`, got " +
                         text(options.kept_groups) + " of " + text(options.groups));
  }
  const int64_t open = experts / options.groups * options.kept_groups;
  if (k > open) {
    return wrong(op, "k must be at most the experts of `topk_group` groups, got k = " + text(k) +
                         " for " + text(open) + " experts");
  }
  if (options.groups > kTopkRouteMaxGroups) {
    return Status::Unimplemented(std::string(op) + ": at most " + text(kTopkRouteMaxGroups) +
                                 " groups are supported, got " + text(options.groups));
  }
  return Status();
}

Status check_bias(const char* op, const TensorView* bias, const TensorView& scores) {
  if (bias == nullptr) return Status();
  const Argument argument{op, "correction_bias", *bias};
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {scores.shape[1]}, "[E]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, {op, "scores", scores}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  return check_contiguous(argument);
}

// Gives each group a power of two of lanes, and each lane as few experts as whole vectors allow.
Status lay_out(const char* op, const TensorView& scores, const TensorView* bias,
               const TopkRouteOptions& options, TopkRouteArgs* args, int* per_lane) {
  const int64_t element = dtype_bytes(scores.dtype);
  args->group = static_cast<int>(args->experts / options.groups);
  args->groups = static_cast<int>(options.groups);
  args->kept_groups = static_cast<int>(options.kept_groups);
  args->lane_shift = 5;
  while (args->groups << args->lane_shift > 32) --args->lane_shift;
  args->lanes_per_group = 1 << args->lane_shift;
  const int64_t least = ceil_div(args->group, args->lanes_per_group);
  *per_lane = 0;
  for (const TopkRouteKernel& kernel : KernelTable(topk_route_kernels)) {
    if (kernel.dtype == scores.dtype && kernel.per_lane >= least) {
      *per_lane = kernel.per_lane;
      break;
    }
  }
  if (*per_lane == 0) {
    return Status::Unimplemented(std::string(op) + ": " + text(options.groups) + " groups of " +
                                 text(args->group) + " experts are not supported");
  }
  args->per_lane = static_cast<int>(least);
  args->vector_bytes = static_cast<int>(element);
  if (scores.strides[1] == 1 || args->experts == 1) {
    args->vector_bytes = widest_vector_bytes(scores.data, args->rows, scores.strides[0],
                                             args->experts, scores.dtype);
    while (args->group * element % args->vector_bytes != 0) args->vector_bytes /= 2;
    const int64_t vector = args->vector_bytes / element;
    args->per_lane = static_cast<int>(ceil_div(least, vector) * vector);
  }
  args->bias = bias == nullptr ? nullptr : static_cast<const float*>(bias->data);
  args->bias_vectors = args->group % 4 == 0 && args->per_lane % 4 == 0 &&
                       reinterpret_cast<uintptr_t>(args->bias) % 16 == 0;
  return Status();
}

// The experts of tokens, in place of a selection.
Status lay_out_table(const char* op, const TensorView& scores, const TensorView* token_ids,
                     const TensorView* table, HashRouteArgs* args) {
  if (token_ids == nullptr || table == nullptr) {
    return wrong(op, "`token_ids` and `expert_table` must be given together");
  }
  const Argument ids{op, "token_ids", *token_ids};
  const Argument experts{op, "expert_table", *table};
  TIERCEL_RETURN_IF_ERROR(check_dtype(ids, {DType::kInt32, DType::kInt64}));
  TIERCEL_RETURN_IF_ERROR(check_shape(ids, {args->rows}, "[T]"));
  TIERCEL_RETURN_IF_ERROR(check_dtype(experts, {DType::kInt32}));
  TIERCEL_RETURN_IF_ERROR(check_rank(experts, 2));
  TIERCEL_RETURN_IF_ERROR(check_shape(experts, {table->shape[0], args->k}, "[tokens, k]"));
  for (const Argument& argument : {ids, experts}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(argument, {op, "scores", scores}));
    TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(argument));
  }
  if (args->bias != nullptr || args->kept_groups != args->groups) {
    return wrong(op, "`correction_bias` and `topk_group` must not be given with `expert_table`");
  }
  args->token_ids = token_ids->data;
  args->int64_tokens = token_ids->dtype == DType::kInt64;
  args->table = static_cast<const int32_t*>(table->data);
  args->tokens = table->shape[0];
  args->dtype = scores.dtype;
  return Status();
}

Status prepare(const char* op, const TensorView& scores, const TensorView* bias,
               const TensorView& weights, const TensorView& indices,
               const TopkRouteOptions& options, TopkRouteArgs* args, int* per_lane) {
  TIERCEL_RETURN_IF_ERROR(topk_check(
      op, scores, weights, indices,
      {kTopkRouteMaxExperts, kTopkRouteMaxColumns, std::max<int64_t>(options.shared, 0)}));
  args->rows = scores.shape[0];
  args->experts = static_cast<int>(scores.shape[1]);
  args->shared = static_cast<int>(options.shared);
  args->k = static_cast<int>(weights.shape[1] - options.shared);
  TIERCEL_RETURN_IF_ERROR(check_options(op, args->experts, args->k, options));
  TIERCEL_RETURN_IF_ERROR(check_bias(op, bias, scores));
  const int64_t element = dtype_bytes(scores.dtype);
  args->scores = scores.data;
  args->row_stride = scores.strides[0] * element;
  args->inner_stride = scores.strides[1] * element;
  args->weights = static_cast<float*>(weights.data);
  args->indices = indices.data;
  args->scoring = options.scoring;
  args->scaling = options.scaling;
  args->all_scores = options.softmax.softmax_first && !options.softmax.renormalize;
  args->renormalize = options.softmax.renormalize;
  args->int64_indices = indices.dtype == DType::kInt64;
  return lay_out(op, scores, bias, options, args, per_lane);
}

const Kernel& find(DType dtype, int per_lane, bool aligned) {
  return KernelTable(topk_route_kernels)
      .find([&](const TopkRouteKernel& kernel) {
        return kernel.dtype == dtype && kernel.per_lane == per_lane && kernel.aligned == aligned;
      })
      ->kernel;
}

const Kernel& find_hashed(bool aligned) {
  return KernelTable(hash_route_kernels)
      .find([&](const HashRouteKernel& kernel) { return kernel.aligned == aligned; })
      ->kernel;
}

struct Call {
  HashRouteArgs topk{};  // kernels that select read its first part
  MoeAlignArgs align;
  const Kernel* kernel = nullptr;
  LaunchConfig config;
};

Status prepare_alone(const TopkRouteCall& of, Call* call) {
  int per_lane;
  TIERCEL_RETURN_IF_ERROR(prepare(kOp, *of.scores, of.bias, *of.weights, *of.indices, of.options,
                                  &call->topk, &per_lane));
  const int64_t grid = ceil_div(call->topk.rows, kTopkRouteThreads / 32);
  if (grid > 0x7fffffff) {
    return Status::Unimplemented(std::string(kOp) + ": too many rows for one launch, got " +
                                 text(call->topk.rows));
  }
  call->topk.early_launch = grid <= 512;
  call->kernel = &find(of.scores->dtype, per_lane, false);
  if (of.token_ids != nullptr || of.expert_table != nullptr) {
    TIERCEL_RETURN_IF_ERROR(
        lay_out_table(kOp, *of.scores, of.token_ids, of.expert_table, &call->topk));
    call->kernel = &find_hashed(false);
  }
  call->config.grid.x = static_cast<uint32_t>(grid);
  call->config.block.x = kTopkRouteThreads;
  call->config.dependent = true;
  return Status();
}

Status prepare_aligned(const TopkRouteAlignCall& of, Call* call) {
  int per_lane;
  TIERCEL_RETURN_IF_ERROR(prepare(kAlignOp, *of.scores, of.bias, *of.weights, *of.indices,
                                  of.options, &call->topk, &per_lane));
  const int64_t rows = call->topk.rows, columns = call->topk.k + call->topk.shared;
  if (rows > kTopkAlignMaxTokens) {
    return Status::Unimplemented(std::string(kAlignOp) + ": one launch takes up to " +
                                 text(kTopkAlignMaxTokens) + " tokens, got " + text(rows));
  }
  MoeAlignOptions align = of.align;
  align.num_experts = call->topk.experts + call->topk.shared;
  TIERCEL_RETURN_IF_ERROR(moe_align_check(kAlignOp, {kAlignOp, "scores", *of.scores},
                                          rows * columns, of.expert_map, of.outputs, align));
  call->topk.early_launch = true;  // the kernel does it
  call->align = moe_align_args(rows * columns, of.expert_map, of.outputs, align);
  call->align.span = static_cast<uint32_t>(kTopkAlignRows * columns);
  call->kernel = &find(of.scores->dtype, per_lane, true);
  if (of.token_ids != nullptr || of.expert_table != nullptr) {
    TIERCEL_RETURN_IF_ERROR(
        lay_out_table(kAlignOp, *of.scores, of.token_ids, of.expert_table, &call->topk));
    call->kernel = &find_hashed(true);
  }
  unsigned cluster = 1;
  while (cluster * kTopkAlignRows < rows) cluster *= 2;
  call->config.grid.x = cluster;
  call->config.cluster.x = cluster;
  // One thread per expert.
  call->config.block.x =
      align.num_experts <= kTopkAlignThreads ? kTopkAlignThreads : kTopkRouteAlignThreads;
  call->config.dynamic_smem =
      moe_align_shared_bytes(call->align.experts, kTopkAlignRows, cluster, call->align.span);
  call->config.dependent = true;
  return Status();
}

}  // namespace

Status topk_route_plan(const TopkRouteCall& of, TopkSoftmaxPlan* plan) {
  Call call;
  TIERCEL_RETURN_IF_ERROR(prepare_alone(of, &call));
  *plan = {call.kernel->name(),    kTopkRouteThreads / 32, 32,
           call.topk.vector_bytes, call.config.grid.x,     call.config.block.x};
  if (call.topk.rows == 0) *plan = {"none", 0, 0, 0, 0, 0};
  return Status();
}

Status topk_route(const TopkRouteCall& of, void* stream) {
  Call call;
  TIERCEL_RETURN_IF_ERROR(prepare_alone(of, &call));
  if (call.topk.rows == 0) return Status();
  void* pointers[] = {&call.topk};
  return call.kernel->launch(call.config, of.scores->device_index, stream, pointers);
}

Status topk_route_align_plan(const TopkRouteAlignCall& of, TopkAlignPlan* plan) {
  Call call;
  TIERCEL_RETURN_IF_ERROR(prepare_aligned(of, &call));
  *plan = {call.kernel->name(), call.config.cluster.x, call.config.block.x,
           call.config.dynamic_smem};
  return Status();
}

Status topk_route_align(const TopkRouteAlignCall& of, void* stream) {
  Call call;
  TIERCEL_RETURN_IF_ERROR(prepare_aligned(of, &call));
  void* pointers[] = {&call.topk, &call.align};
  return call.kernel->launch(call.config, of.scores->device_index, stream, pointers);
}

}  // namespace tiercel
