// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/backward/backward.h"

#include <algorithm>
#include <string>

#include "kernels/attention/backward/kernels.h"
#include "kernels/attention/common/problem.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "attention_backward";
constexpr int64_t kMaxHeadDimension = 128;
constexpr int64_t kL2Bytes = 32 << 20;  // of 50 MB, for the tiles in flight

Status check_gradient(const char* name, const TensorView& gradient, const TensorView& like,
                      const TensorView& q, bool empty, const char* why) {
  const Argument argument{kOp, name, gradient};
  TIERCEL_RETURN_IF_ERROR(check_rank(argument, 4));
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {q.dtype}));
  TIERCEL_RETURN_IF_ERROR(
      check_shape(argument, {like.shape[0], like.shape[1], like.shape[2], like.shape[3]}, why));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, Argument{kOp, "q", q}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  if (empty) return Status();
  const TensorMapSpec any{
      4, {1, 64, 1, 64}, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE};
  return check_tensor_map(any, gradient, kOp, name);
}

Status check(const AttentionBackwardCall& call, const AttentionOptions& options,
             AttentionProblem* problem) {
  const TensorView& q = *call.q;
  TIERCEL_RETURN_IF_ERROR(
      check_attention(kOp, q, *call.k, *call.v, *call.out, call.lse, options, problem));
  TIERCEL_RETURN_IF_ERROR(check_attention_same_d(kOp, *call.v, *problem));
  if (call.grad_lse != nullptr) {
    const Argument argument{kOp, "grad_lse", *call.grad_lse};
    TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat32}));
    TIERCEL_RETURN_IF_ERROR(
        check_shape(argument, {problem->batch, problem->heads, problem->seq_q}, "[B, H, Sq]"));
    TIERCEL_RETURN_IF_ERROR(check_same_device(argument, Argument{kOp, "q", q}));
    TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(argument));
  }
  TIERCEL_RETURN_IF_ERROR(
      check_gradient("grad", *call.grad, q, q, problem->empty(), "[B, Sq, H, D]"));
  TIERCEL_RETURN_IF_ERROR(check_gradient("dq", *call.dq, q, q, problem->empty(), "[B, Sq, H, D]"));
  TIERCEL_RETURN_IF_ERROR(
      check_gradient("dk", *call.dk, *call.k, q, problem->empty(), "[B, Sk, Hk, D]"));
  TIERCEL_RETURN_IF_ERROR(
      check_gradient("dv", *call.dv, *call.k, q, problem->empty(), "[B, Sk, Hk, D]"));
  if (problem->d > kMaxHeadDimension) {
    return Status::Unimplemented(
        mismatch(Argument{kOp, "q", q},
                 "have a head dimension that is a multiple of 8 up to 128 for the precompiled "
                 "kernels",
                 std::to_string(problem->d)));
  }
  // Blocks of queries and tiles of keys have 32-bit numbers.
  const int64_t pairs = std::max<int64_t>(problem->batch * problem->heads, 1);
  const int64_t longest = std::max(problem->seq_q, problem->seq_k);
  if (ceil_div(longest, 64) > (int64_t{1} << 30) / pairs) {
    return Status::Unimplemented(mismatch(Argument{kOp, "q", q},
                                          "have fewer than 2^30 blocks of 64 queries or keys",
                                          "shape " + shape_text(q.shape, q.ndim)));
  }
  return Status();
}

struct Choice {
  const AttentionBackwardKernel* kernel = nullptr;
  const AttentionBackwardRowsKernel* rows = nullptr;
  int64_t blocks = 0;  // of queries, of all heads
  int band = 1;
  bool descending = false;
  unsigned grid = 0;

  int64_t rows_of_blocks() const { return blocks * kernel->variant.tile_m; }
  int64_t stats() const { return rows_of_blocks() * 2; }
  int64_t sums() const { return rows_of_blocks() * kernel->variant.tile_d; }
  int64_t workspace() const { return stats() + sums() + blocks + 1; }  // a turn each, a counter
};

Choice choose(DType dtype, const AttentionProblem& problem, bool deterministic,
              int multiprocessors) {
  Choice choice;
  for (const AttentionBackwardKernel& kernel : KernelTable(attention_backward_kernels)) {
    const AttentionBackwardVariant& variant = kernel.variant;
    if (variant.dtype == dtype && variant.capped == problem.capped && variant.max_d >= problem.d &&
        (choice.kernel == nullptr || variant.max_d < choice.kernel->variant.max_d)) {
      choice.kernel = &kernel;
    }
  }
  const AttentionBackwardVariant& variant = choice.kernel->variant;
  choice.rows = KernelTable(attention_backward_rows_kernels).find([&](const auto& rows) {
    return rows.dtype == dtype && rows.tile_d == variant.tile_d && rows.tile_m == variant.tile_m;
  });
  choice.blocks = problem.batch * problem.heads * ceil_div(problem.seq_q, variant.tile_m);
  const int64_t pairs = problem.batch * problem.kv_heads;
  const int64_t tiles = pairs * ceil_div(problem.seq_k, kAttentionBackwardKeys);
  choice.grid = static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors));
  // Under a causal mask, tiles of early keys have the most queries: they come first, for as many
  // heads as the L2 cache holds q, its gradient and dq's sums of. If dq's order is fixed, late keys
  // come first: their sums are ready when early ones need them.
  if (problem.growing) {
    const int64_t head = problem.seq_q * variant.tile_d * 8 * (problem.heads / problem.kv_heads);
    choice.band = static_cast<int>(std::clamp<int64_t>(kL2Bytes / head, 1, pairs));
  }
  choice.descending = problem.growing && deterministic;
  return choice;
}

AttentionRows rows_of(const TensorView& view) {
  return {static_cast<char*>(view.data), view.strides[0], view.strides[1], view.strides[2]};
}

bool nothing(const AttentionProblem& problem) { return problem.empty() || problem.seq_k == 0; }

}  // namespace

Status attention_backward_plan(const AttentionBackwardCall& call, int multiprocessors,
                               AttentionBackwardPlan* plan) {
  AttentionProblem problem;
  TIERCEL_RETURN_IF_ERROR(check(call, call.options, &problem));
  *plan = {"none", 0, 0, 0, false, 0, 0, 0, 0};
  if (nothing(problem)) return Status();
  const Choice choice = choose(call.q->dtype, problem, call.deterministic, multiprocessors);
  const AttentionBackwardKernel& kernel = *choice.kernel;
  *plan = {kernel.kernel.name(), kernel.variant.tile_m, kAttentionBackwardKeys,
           choice.band,          choice.descending,     choice.grid,
           kernel.block,         kernel.dynamic_smem,   choice.workspace()};
  return Status();
}

Status attention_backward(const AttentionBackwardCall& call, void* stream) {
  const AttentionOptions& options = call.options;
  AttentionProblem problem;
  TIERCEL_RETURN_IF_ERROR(check(call, call.options, &problem));
  if (nothing(problem)) return Status();
  const TensorView& q = *call.q;
  const int device = q.device_index;
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(device, &multiprocessors));
  const Choice choice = choose(q.dtype, problem, call.deterministic, multiprocessors);
  const AttentionBackwardKernel& kernel = *choice.kernel;
  const Argument workspace{kOp, "workspace", *call.workspace};
  TIERCEL_RETURN_IF_ERROR(check_dtype(workspace, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(workspace, {choice.workspace()}, "what the plan says"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(workspace, Argument{kOp, "q", q}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(workspace));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(workspace));

  AttentionBackwardRowsArgs rows{};
  rows.out = rows_of(*call.out);
  rows.grad = rows_of(*call.grad);
  rows.dq = rows_of(*call.dq);
  rows.lse = static_cast<const float*>(call.lse->data);
  rows.grad_lse = call.grad_lse == nullptr ? nullptr : static_cast<float*>(call.grad_lse->data);
  rows.stats = static_cast<float*>(call.workspace->data);
  rows.sums = rows.stats + choice.stats();
  rows.counter = reinterpret_cast<int32_t*>(rows.sums + choice.sums());
  rows.turns = call.deterministic ? rows.counter + 1 : nullptr;
  rows.rows = problem.seq_q;
  rows.heads = static_cast<int>(problem.heads);
  rows.blocks = static_cast<int>(ceil_div(problem.seq_q, kernel.variant.tile_m));
  rows.d = static_cast<int>(problem.d);
  rows.scale = static_cast<float>(options.scale);
  LaunchConfig rows_config;
  rows_config.grid.x = static_cast<unsigned>(choice.blocks);
  rows_config.block.x = kAttentionBackwardThreads;
  rows_config.dependent = true;
  void* rows_args[] = {&rows};

  constexpr const char* kNames[] = {"q", "k", "v", "grad", "dk", "dv"};
  const TensorView* tensors[] = {call.q, call.k, call.v, call.grad, call.dk, call.dv};
  CUtensorMap maps[6];
  for (int i = 0; i < 6; ++i) {
    TIERCEL_RETURN_IF_ERROR(encode_tensor_map(kernel.maps[i], AttentionByHead(*tensors[i]).view,
                                              kOp, kNames[i], &maps[i]));
  }
  int32_t batch = static_cast<int32_t>(problem.batch);
  int32_t seq_q = static_cast<int32_t>(problem.seq_q);
  int32_t seq_k = static_cast<int32_t>(problem.seq_k);
  int32_t heads = static_cast<int32_t>(problem.heads);
  int32_t kv_heads = static_cast<int32_t>(problem.kv_heads);
  auto [scale, slope] = attention_scales(options);
  int32_t gain = attention_float_bits(options.scale);
  int32_t left = attention_limit(options.left);
  int32_t right = attention_limit(options.right);
  int32_t band = choice.band;
  int32_t descending = choice.descending;
  void* args[] = {&maps[0],    &maps[1],   &maps[2],    &maps[3],      &maps[4], &maps[5],
                  &rows.stats, &rows.sums, &rows.turns, &rows.counter, &batch,   &seq_q,
                  &seq_k,      &heads,     &kv_heads,   &scale,        &slope,   &gain,
                  &left,       &right,     &band,       &descending};
  LaunchConfig config;
  config.grid.x = choice.grid;
  config.block.x = kernel.block;
  config.dynamic_smem = kernel.dynamic_smem;
  config.dependent = kernel.dependent;
  TIERCEL_RETURN_IF_ERROR(choice.rows->prepare.launch(rows_config, device, stream, rows_args));
  TIERCEL_RETURN_IF_ERROR(kernel.kernel.launch(config, device, stream, args));
  return choice.rows->finish.launch(rows_config, device, stream, rows_args);
}

Status attention_backward_load(int device) {
  TIERCEL_RETURN_IF_ERROR(KernelTable(attention_backward_kernels).load_all(device));
  for (const AttentionBackwardRowsKernel& rows : KernelTable(attention_backward_rows_kernels)) {
    TIERCEL_RETURN_IF_ERROR(rows.prepare.load(device));
    TIERCEL_RETURN_IF_ERROR(rows.finish.load(device));
  }
  return Status();
}

}  // namespace tiercel
