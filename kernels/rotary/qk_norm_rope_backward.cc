// SPDX-License-Identifier: Apache-2.0
#include "kernels/rotary/qk_norm_rope_backward.h"

#include <algorithm>
#include <string>

#include "kernels/rotary/kv_cache_prepare.h"
#include "kernels/rotary/rotary_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "qk_norm_rope_backward";
// A fixed number: sums must not depend on the device.
constexpr int64_t kMostBlocks = 4 * kDefaultMultiprocessors;

struct Choice {
  const QkNormRopeBackwardKernel* kernel = nullptr;  // null: no row
  Dim3 grid;
  Dim3 block;
};

Status check_weight_gradient(const char* name, const TensorView* gradient, const char* weight_name,
                             const TensorView* weight, const Argument& q) {
  if (gradient == nullptr) return Status();
  const Argument argument{kOp, name, *gradient};
  if (weight == nullptr) {
    return Status::InvalidArgument(
        mismatch(argument, std::string("be None without `") + weight_name + "`", "a tensor"));
  }
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {weight->dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {q.view.shape[2]}, "[D]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, q));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  return check_contiguous(argument);
}

Status check(const QkNormRopeBackwardCall& t) {
  TIERCEL_RETURN_IF_ERROR(check_qk_heads(kOp, t.heads));
  const Argument q{kOp, "q", *t.heads.q}, k{kOp, "k", *t.heads.k};
  for (const Argument& like_q :
       {Argument{kOp, "grad_q_out", *t.grad_q_out}, Argument{kOp, "grad_q", *t.grad_q}}) {
    TIERCEL_RETURN_IF_ERROR(check_like(like_q, q, "[T, H, D]"));
  }
  for (const Argument& like_k :
       {Argument{kOp, "grad_k_out", *t.grad_k_out}, Argument{kOp, "grad_k", *t.grad_k}}) {
    TIERCEL_RETURN_IF_ERROR(check_like(like_k, k, "[T, Hk, D]"));
  }
  TIERCEL_RETURN_IF_ERROR(
      check_weight_gradient("grad_q_weight", t.grad_q_weight, "q_weight", t.heads.q_weight, q));
  return check_weight_gradient("grad_k_weight", t.grad_k_weight, "k_weight", t.heads.k_weight, q);
}

Status choose(const QkHeads& heads, QkNormRopeBackwardArgs* args, Choice* choice) {
  const int64_t tokens = heads.q->shape[0];
  const int64_t q_rows = tokens * args->q_heads, k_rows = tokens * args->kv_heads;
  if (q_rows > 0x7fffffff || k_rows > 0x7fffffff) {
    return Status::Unimplemented(std::string(kOp) + ": too large for the kernels, got shapes " +
                                 shape_text(heads.q->shape, 3) + " and " +
                                 shape_text(heads.k->shape, 3));
  }
  args->q_rows = static_cast<uint32_t>(q_rows);
  args->k_rows = static_cast<uint32_t>(k_rows);
  const int lanes = qk_lanes(*args);
  choice->block.x = static_cast<uint32_t>(lanes);
  choice->block.y = static_cast<uint32_t>(kQkBackwardThreads / lanes);
  int64_t q_blocks = ceil_div(q_rows, int64_t{choice->block.y});
  int64_t k_blocks = ceil_div(k_rows, int64_t{choice->block.y});
  if (q_blocks + k_blocks > kMostBlocks) {
    // In proportion to the rows; neither of them without a block if it has rows.
    const int64_t share = kMostBlocks * q_rows / (q_rows + k_rows);
    q_blocks = std::clamp(share, std::min<int64_t>(q_blocks, 1),
                          kMostBlocks - std::min<int64_t>(k_blocks, 1));
    k_blocks = std::min(k_blocks, kMostBlocks - q_blocks);
  }
  args->q_blocks = static_cast<uint32_t>(q_blocks);
  choice->grid.x = static_cast<uint32_t>(q_blocks + k_blocks);
  if (choice->grid.x == 0) return Status();
  choice->kernel =
      KernelTable(qk_norm_rope_backward_kernels).find([&](const QkNormRopeBackwardKernel& kernel) {
        return kernel.dtype == heads.q->dtype && kernel.interleaved == heads.interleaved;
      });
  return Status();
}

Status prepare(const QkNormRopeBackwardCall& t, QkNormRopeBackwardArgs* args, Choice* choice) {
  TIERCEL_RETURN_IF_ERROR(check(t));
  args->q = heads_of(*t.heads.q);
  args->k = heads_of(*t.heads.k);
  args->grad_q_out = heads_of(*t.grad_q_out);
  args->grad_k_out = heads_of(*t.grad_k_out);
  args->grad_q = heads_of(*t.grad_q);
  args->grad_k = heads_of(*t.grad_k);
  bool aligned = true;
  for (const HeadsOfTokens& heads :
       {args->grad_q_out, args->grad_k_out, args->grad_q, args->grad_k}) {
    aligned = aligned && in_vectors(heads, 16);
  }
  TIERCEL_RETURN_IF_ERROR(prepare_qk_heads(kOp, t.heads, aligned, args));
  if (t.heads.q->shape[2] == 0) return Status();
  return choose(t.heads, args, choice);
}

Status check_workspace(const QkNormRopeBackwardCall& t, int64_t parts) {
  const Argument q{kOp, "q", *t.heads.q};
  if (t.workspace == nullptr) {
    return Status::InvalidArgument(std::string(kOp) +
                                   ": `workspace` must be a tensor if a weight's gradient is "
                                   "wanted, got None");
  }
  const Argument workspace{kOp, "workspace", *t.workspace};
  TIERCEL_RETURN_IF_ERROR(check_dtype(workspace, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(workspace, {parts, q.view.shape[2]}, "[parts, D]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(workspace, q));
  TIERCEL_RETURN_IF_ERROR(check_cuda(workspace));
  return check_contiguous(workspace);
}

Status launch_weight_grad(const QkNormRopeBackwardCall& t, const QkNormRopeBackwardArgs& args,
                          const Choice& choice, void* stream) {
  QkWeightGradArgs sums{};
  sums.partial = args.partial;
  sums.q_blocks = static_cast<int>(args.q_blocks);
  sums.blocks = static_cast<int>(choice.grid.x);
  sums.size = static_cast<int>(t.heads.q->shape[2]);
  sums.wide_q_weight = args.wide_q_weight;
  sums.wide_k_weight = args.wide_k_weight;
  if (t.grad_q_weight != nullptr) {
    sums.grad_q_weight = static_cast<char*>(t.grad_q_weight->data);
  }
  if (t.grad_k_weight != nullptr) {
    sums.grad_k_weight = static_cast<char*>(t.grad_k_weight->data);
  }
  const QkWeightGradKernel* const kernel =
      KernelTable(qk_weight_grad_kernels).find([&](const QkWeightGradKernel& one) {
        return one.dtype == t.heads.q->dtype;
      });
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(ceil_div(sums.size, kQkWeightGradColumns));
  config.grid.y = 2;
  config.block.x = kQkWeightGradColumns;
  config.block.y = kQkWeightGradRows;
  config.dependent = true;
  void* pointers[] = {&sums};
  return kernel->kernel.launch(config, t.heads.q->device_index, stream, pointers);
}

}  // namespace

Status qk_norm_rope_backward_plan(const QkNormRopeBackwardCall& call,
                                  QkNormRopeBackwardPlan* plan) {
  QkNormRopeBackwardArgs args{};
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &choice));
  *plan = {"none", 0, 0, 0, 0};
  if (choice.kernel != nullptr) {
    *plan = {choice.kernel->kernel.name(), choice.block.x, choice.grid.x,
             choice.block.x * choice.block.y, choice.grid.x};
  }
  return Status();
}

Status qk_norm_rope_backward(const QkNormRopeBackwardCall& call, void* stream) {
  QkNormRopeBackwardArgs args{};
  Choice choice;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &choice));
  if (call.heads.q->shape[2] == 0) return Status();
  const bool sums = call.grad_q_weight != nullptr || call.grad_k_weight != nullptr;
  if (sums) {
    const int64_t parts = choice.kernel == nullptr ? 0 : choice.grid.x;
    TIERCEL_RETURN_IF_ERROR(check_workspace(call, parts));
    args.partial = static_cast<float*>(call.workspace->data);
  }
  if (choice.kernel != nullptr) {
    LaunchConfig config;
    config.grid = choice.grid;
    config.block = choice.block;
    config.dependent = true;
    void* pointers[] = {&args};
    TIERCEL_RETURN_IF_ERROR(
        choice.kernel->kernel.launch(config, call.heads.q->device_index, stream, pointers));
  } else {
    choice.grid.x = 0;
  }
  return sums ? launch_weight_grad(call, args, choice, stream) : Status();
}

}  // namespace tiercel
