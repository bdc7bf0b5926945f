// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/forward/forward.h"

#include <algorithm>

#include "kernels/attention/common/problem.h"
#include "kernels/attention/forward/kernels.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "attention";
constexpr char kVarlenOp[] = "attention_varlen";

// Three warpgroups that share keys do more at once; two waste less of a short sequence.
constexpr int64_t kShort = 1024;

bool better(const AttentionVariant& a, const AttentionVariant& b, const AttentionProblem& problem) {
  const int columns_a = a.d + a.d_v, columns_b = b.d + b.d_v;  // that a score is multiplied with
  if (columns_a != columns_b) return columns_a < columns_b;
  // All chunks of a sequence take the same tiles in the batch-invariant mode.
  const bool small =
      problem.mask != AttentionMask::kNone && problem.seq_q <= kShort && !batch_invariant();
  return small ? a.tile_m < b.tile_m : a.tile_m > b.tile_m;
}

struct Choice {
  const AttentionKernel* kernel;
  int band;
  unsigned blocks;
};

// Null if none has this mask for the problem's columns.
const AttentionKernel* find(DType dtype, const AttentionProblem& problem, AttentionMask mask) {
  int count = 0;
  const AttentionKernel* kernels = attention_kernels(&count);
  const AttentionKernel* found = nullptr;
  for (int i = 0; i < count; ++i) {
    const AttentionVariant& variant = kernels[i].variant;
    if (variant.dtype != dtype || variant.mask != mask || variant.capped != problem.capped ||
        variant.packed != problem.packed || variant.d < problem.d || variant.d_v < problem.d_v) {
      continue;
    }
    if (found == nullptr || better(variant, found->variant, problem)) found = &kernels[i];
  }
  return found;
}

Choice choose(DType dtype, const AttentionProblem& problem, int multiprocessors) {
  Choice choice{find(dtype, problem, problem.mask), 1, 0};
  // A window without limits is any mask.
  if (choice.kernel == nullptr) choice.kernel = find(dtype, problem, AttentionMask::kWindow);
  const int64_t pairs = problem.batch * problem.heads;
  const int64_t q_tiles = ceil_div(problem.seq_q, choice.kernel->variant.tile_m);
  if (problem.growing) choice.band = attention_band(problem, q_tiles, multiprocessors, 2);
  const int64_t tiles = q_tiles * pairs;
  choice.blocks = static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors));
  return choice;
}

AttentionPlan plan_of(DType dtype, const AttentionProblem& problem, int multiprocessors) {
  if (problem.empty()) return {"none", 0, 0, 0, 0, 0, 0};
  const Choice choice = choose(dtype, problem, multiprocessors);
  const AttentionKernel& kernel = *choice.kernel;
  return {kernel.kernel.name(), kernel.variant.tile_m, kernel.variant.tile_n, choice.band,
          choice.blocks,        kernel.block,          kernel.dynamic_smem};
}

// Views are [batch, heads, rows, d], as the maps see them; `packed` is null unless the problem is.
Status launch(const char* op, const AttentionProblem& problem, const AttentionOptions& options,
              const TensorView (&views)[4], void* lse, void* sinks, AttentionPackedArgs* packed,
              void* stream) {
  const TensorView& q = views[0];
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(q.device_index, &multiprocessors));
  const Choice choice = choose(q.dtype, problem, multiprocessors);
  const AttentionKernel& kernel = *choice.kernel;

  constexpr const char* kNames[] = {"q", "k", "v", "out"};
  CUtensorMap maps[4];
  for (int i = 0; i < 4; ++i) {
    TIERCEL_RETURN_IF_ERROR(encode_tensor_map(kernel.maps[i], views[i], op, kNames[i], &maps[i]));
  }
  LaunchConfig config;
  config.grid.x = choice.blocks;
  config.block.x = kernel.block;
  config.dynamic_smem = kernel.dynamic_smem;
  config.dependent = kernel.dependent;
  AttentionArgs args(problem, options, choice.band);
  return kernel.kernel.launch(config, q.device_index, stream,
                              args.list(maps, &lse, &sinks, packed));
}

Status check(const AttentionCall& call, AttentionProblem* problem) {
  TIERCEL_RETURN_IF_ERROR(
      check_attention(kOp, *call.q, *call.k, *call.v, *call.out, call.lse, call.options, problem));
  if (call.sinks == nullptr) return Status();
  return check_attention_sinks(kOp, "sinks", *call.sinks, problem->heads, *call.q);
}

Status check(const PackedAttention& call, AttentionProblem* problem) {
  TIERCEL_RETURN_IF_ERROR(check_attention_varlen(call, problem));
  if (call.sinks == nullptr) return Status();
  return check_attention_sinks(kVarlenOp, "sinks", *call.sinks, problem->heads, *call.q);
}

void* data_of(const TensorView* tensor) { return tensor == nullptr ? nullptr : tensor->data; }

}  // namespace

Status attention_plan(const AttentionCall& call, int multiprocessors, AttentionPlan* plan) {
  AttentionProblem problem;
  TIERCEL_RETURN_IF_ERROR(check(call, &problem));
  *plan = plan_of(call.q->dtype, problem, multiprocessors);
  return Status();
}

Status attention(const AttentionCall& call, void* stream) {
  AttentionProblem problem;
  TIERCEL_RETURN_IF_ERROR(check(call, &problem));
  if (problem.empty()) return Status();
  const AttentionByHead q(*call.q), k(*call.k), v(*call.v), out(*call.out);
  return launch(kOp, problem, call.options, {q.view, k.view, v.view, out.view}, data_of(call.lse),
                data_of(call.sinks), /*packed=*/nullptr, stream);
}

Status attention_varlen_plan(const PackedAttention& call, int multiprocessors,
                             AttentionPlan* plan) {
  AttentionProblem problem;
  TIERCEL_RETURN_IF_ERROR(check(call, &problem));
  *plan = plan_of(call.q->dtype, problem, multiprocessors);
  return Status();
}

Status attention_varlen(const PackedAttention& call, void* stream) {
  AttentionProblem problem;
  TIERCEL_RETURN_IF_ERROR(check(call, &problem));
  if (problem.empty()) return Status();
  const AttentionPackedRows q(*call.q), k(*call.k), v(*call.v), out(*call.out);
  AttentionPackedArgs packed(call);
  return launch(kVarlenOp, problem, call.options, {q.view, k.view, v.view, out.view},
                data_of(call.lse), data_of(call.sinks), &packed, stream);
}

}  // namespace tiercel
