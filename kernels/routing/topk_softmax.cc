// SPDX-License-Identifier: Apache-2.0
#include "kernels/routing/topk_softmax.h"

#include <string>

#include "kernels/routing/topk_route_kernels.h"
#include "kernels/routing/topk_softmax_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "topk_softmax";

TopkSoftmaxChoice choose(DType dtype, const TopkSoftmaxArgs& args) {
  // In the batch-invariant mode one kernel serves any number of rows, with the sums of
  // topk_softmax_align: those by rounds.
  const auto fits = [&](const TopkSoftmaxKernel& kernel) {
    if (!batch_invariant()) return kernel.max_rows >= args.rows;
    return kernel.by_rounds || (args.descending && kernel.lanes_per_row >= kTopkDescendingLanes &&
                                kernel.max_k == kTopkDescending);
  };
  for (const TopkSoftmaxKernel& kernel : KernelTable(topk_softmax_kernels)) {
    if (kernel.dtype == dtype && fits(kernel) && kernel.max_experts >= args.experts &&
        kernel.max_k >= args.k) {
      return {&kernel, kTopkSoftmaxThreads, true};
    }
  }
  return {nullptr, 0, false};  // not reached: the table covers all that check() lets through
}

unsigned rows_per_block(const TopkSoftmaxChoice& choice) {
  return choice.block / choice.kernel->lanes_per_row;
}

int64_t grid_size(int64_t rows, const TopkSoftmaxChoice& choice) {
  return ceil_div(rows, rows_per_block(choice));
}

// True if the next grid may be scheduled when this one starts. Its waiting blocks occupy
// multiprocessors, so this pays only if this grid ends soon (measured on an H200).
bool launches_early(DType dtype, int64_t grid, const TopkSoftmaxChoice& choice) {
  if (choice.kernel->lanes_per_row >= 8) return grid <= 512;
  return grid <= 264 && dtype != DType::kFloat32 && choice.kernel->max_experts <= 128;
}

TopkRouteCall as_route(const TopkSoftmaxCall& call) {
  TopkRouteCall route{call.scores, nullptr, call.weights, call.indices, {}};
  route.options.softmax = call.options;
  return route;
}

}  // namespace

Status topk_check(const char* op, const TensorView& scores, const TensorView& weights,
                  const TensorView& indices, const TopkLimits& limits) {
  const Argument scores_arg{op, "scores", scores};
  const Argument weights_arg{op, "weights", weights};
  const Argument indices_arg{op, "indices", indices};
  TIERCEL_RETURN_IF_ERROR(check_rank(scores_arg, 2));
  TIERCEL_RETURN_IF_ERROR(check_rank(weights_arg, 2));
  TIERCEL_RETURN_IF_ERROR(
      check_dtype(scores_arg, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(weights_arg, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(indices_arg, {DType::kInt32, DType::kInt64}));

  const int64_t rows = scores.shape[0];
  const int64_t experts = scores.shape[1];
  const int64_t columns = weights.shape[1], k = columns - limits.shared;
  if (k < 1 || k > experts) {
    return Status::InvalidArgument(
        std::string(op) + ": k must be between 1 and the number of experts, got k = " +
        std::to_string(k) + " for " + std::to_string(experts) + " experts");
  }
  if (experts > limits.experts) {
    return Status::Unimplemented(std::string(op) + ": at most " + std::to_string(limits.experts) +
                                 " experts are supported, got " + std::to_string(experts));
  }
  if (columns > limits.k) {
    const char* what = limits.shared == 0 ? ": k is supported up to "
                                          : ": k and `n_shared` are supported up to together ";
    return Status::Unimplemented(std::string(op) + what + std::to_string(limits.k) + ", got " +
                                 std::to_string(columns));
  }
  const char* shape = limits.shared == 0 ? "[T, k]" : "[T, k + n_shared]";
  TIERCEL_RETURN_IF_ERROR(check_shape(weights_arg, {rows, columns}, shape));
  TIERCEL_RETURN_IF_ERROR(check_shape(indices_arg, {rows, columns}, shape));
  TIERCEL_RETURN_IF_ERROR(check_cuda(scores_arg));
  TIERCEL_RETURN_IF_ERROR(check_same_device(weights_arg, scores_arg));
  TIERCEL_RETURN_IF_ERROR(check_same_device(indices_arg, scores_arg));
  TIERCEL_RETURN_IF_ERROR(check_cuda(weights_arg));
  TIERCEL_RETURN_IF_ERROR(check_cuda(indices_arg));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(weights_arg));
  return check_contiguous(indices_arg);
}

bool topk_is_large(const TensorView& scores, const TensorView& weights) {
  return scores.ndim == 2 && weights.ndim == 2 &&
         ((batch_invariant() && scores.dtype == DType::kFloat32) ||
          scores.shape[1] > kTopkSoftmaxMaxExperts || weights.shape[1] > kTopkSoftmaxMaxK);
}

Status topk_softmax_prepare(const char* op, const TensorView& scores, const TensorView& weights,
                            const TensorView& indices, const TopkSoftmaxOptions& options,
                            TopkSoftmaxArgs* args, TopkSoftmaxChoice* choice) {
  TIERCEL_RETURN_IF_ERROR(
      topk_check(op, scores, weights, indices, {kTopkSoftmaxMaxExperts, kTopkSoftmaxMaxK, 0}));
  const int64_t element = dtype_bytes(scores.dtype);
  args->scores = scores.data;
  args->row_stride = scores.strides[0] * element;
  args->inner_stride = scores.strides[1] * element;
  args->weights = static_cast<float*>(weights.data);
  args->indices = indices.data;
  args->rows = scores.shape[0];
  args->experts = static_cast<int>(scores.shape[1]);
  args->k = static_cast<int>(weights.shape[1]);
  args->vector_bytes = scores.strides[1] == 1 || args->experts == 1
                           ? widest_vector_bytes(scores.data, args->rows, scores.strides[0],
                                                 args->experts, scores.dtype)
                           : static_cast<int>(element);
  // Dividing the selected weights by their sum cancels the row's denominator.
  args->all_scores = options.softmax_first && !options.renormalize;
  args->int64_indices = indices.dtype == DType::kInt64;
  args->descending = batch_invariant() && !args->all_scores;
  *choice = choose(scores.dtype, *args);
  args->early_launch = launches_early(scores.dtype, grid_size(args->rows, *choice), *choice);
  if (grid_size(args->rows, *choice) > 0x7fffffff) {
    return Status::Unimplemented(std::string(op) + ": too many rows for one launch, got " +
                                 std::to_string(args->rows));
  }
  return Status();
}

Status topk_softmax_launch(const TopkSoftmaxArgs& args, const TopkSoftmaxChoice& choice, int device,
                           void* stream) {
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(grid_size(args.rows, choice));
  config.block.x = choice.block;
  config.dependent = choice.dependent;
  void* pointers[] = {const_cast<TopkSoftmaxArgs*>(&args)};
  return choice.kernel->kernel.launch(config, device, stream, pointers);
}

Status topk_softmax_plan(const TopkSoftmaxCall& call, TopkSoftmaxPlan* plan) {
  if (topk_is_large(*call.scores, *call.weights)) {
    return topk_route_plan(as_route(call), plan);
  }
  TopkSoftmaxArgs args;
  TopkSoftmaxChoice choice;
  TIERCEL_RETURN_IF_ERROR(topk_softmax_prepare(kOp, *call.scores, *call.weights, *call.indices,
                                               call.options, &args, &choice));
  *plan = {choice.kernel->kernel.name(),
           static_cast<int>(rows_per_block(choice)),
           choice.kernel->lanes_per_row,
           args.vector_bytes,
           static_cast<unsigned>(grid_size(args.rows, choice)),
           choice.block};
  if (args.rows == 0) *plan = {"none", 0, 0, 0, 0, 0};
  return Status();
}

Status topk_softmax(const TopkSoftmaxCall& call, void* stream) {
  if (topk_is_large(*call.scores, *call.weights)) return topk_route(as_route(call), stream);
  TopkSoftmaxArgs args;
  TopkSoftmaxChoice choice;
  TIERCEL_RETURN_IF_ERROR(topk_softmax_prepare(kOp, *call.scores, *call.weights, *call.indices,
                                               call.options, &args, &choice));
  if (args.rows == 0) return Status();
  return topk_softmax_launch(args, choice, call.scores->device_index, stream);
}

}  // namespace tiercel
