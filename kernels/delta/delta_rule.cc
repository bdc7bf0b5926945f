// SPDX-License-Identifier: Apache-2.0
#include "kernels/delta/delta_rule.h"

#include <string>

#include "kernels/delta/delta_checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr const char* kOp = "gated_delta_rule";

struct Kernels {
  const Kernel* chunks = nullptr;
  const Kernel* rule = nullptr;
};

Status check_state(const char* name, const TensorView* view, int64_t count, const DeltaSizes& sizes,
                   const Argument& q) {
  if (view == nullptr) return Status();
  const Argument state{kOp, name, *view};
  TIERCEL_RETURN_IF_ERROR(check_dtype(state, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(
      state, {count, sizes.v_heads, sizes.key_size, sizes.value_size}, "[N, Hv, K, V]"));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(state));
  return delta_check_place(state, q);
}

Status check_numbers(const DeltaRuleCall& call, const DeltaSizes& sizes, const Argument& q) {
  const Argument g{kOp, "g", *call.g};
  TIERCEL_RETURN_IF_ERROR(check_dtype(g, {DType::kFloat32}));
  if (call.g->ndim == 4) {
    return Status::Unimplemented(std::string(kOp) + ": a gate for each channel is not supported");
  }
  TIERCEL_RETURN_IF_ERROR(check_shape(g, {sizes.batch, sizes.tokens, sizes.v_heads}, "[B, T, Hv]"));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(g));
  return delta_check_place(g, q);
}

Status lay_out_sequences(const DeltaRuleCall& call, const DeltaSizes& sizes, const Argument& q,
                         DeltaRuleArgs* args) {
  int64_t count = sizes.batch;
  args->length = sizes.tokens;
  args->tokens = sizes.batch * sizes.tokens;
  if (call.cu_seqlens != nullptr) {
    const Argument starts{kOp, "cu_seqlens", *call.cu_seqlens};
    TIERCEL_RETURN_IF_ERROR(check_dtype(starts, {DType::kInt32}));
    TIERCEL_RETURN_IF_ERROR(check_rank(starts, 1));
    if (starts.view.shape[0] == 0) {
      return Status::InvalidArgument(mismatch(starts, "have at least one element", "none"));
    }
    if (sizes.batch != 1) {
      return Status::InvalidArgument(
          mismatch(q, "have a batch of 1 with `cu_seqlens`", std::to_string(sizes.batch)));
    }
    TIERCEL_RETURN_IF_ERROR(delta_check_place(starts, q));
    count = starts.view.shape[0] - 1;
    args->starts = static_cast<const int*>(starts.view.data);
    args->start_step = starts.view.strides[0];
  }
  if (args->tokens > INT32_MAX || count > INT32_MAX) {
    return Status::Unimplemented(std::string(kOp) + ": too many tokens or sequences");
  }
  args->count = static_cast<int>(count);
  return Status();
}

// The fewest warps a block, and so the most blocks, that still run all at once.
int choose_warps(const DeltaSizes& sizes, int64_t count) {
  const auto fits = [&](int warps) { return sizes.value_size % (kDeltaWarpColumns * warps) == 0; };
  int chosen = 1;
  for (int warps = 1; warps <= kDeltaMostWarps; warps *= 2) {
    if (!fits(warps)) break;
    chosen = warps;
    const int64_t blocks = count * sizes.v_heads * sizes.value_size / (kDeltaWarpColumns * warps);
    if (warps > 1 && blocks <= kDefaultMultiprocessors) break;
  }
  return chosen;
}

Status prepare(const DeltaRuleCall& call, DeltaRuleArgs* args, DeltaRulePlan* plan,
               Kernels* kernels) {
  *plan = {"none", "none", 0, 0, 0, 0, 0};
  DeltaSizes sizes;
  TIERCEL_RETURN_IF_ERROR(delta_lay_out(kOp, {call.q, call.k, call.v, call.beta, call.out},
                                        {DType::kBFloat16, DType::kFloat16}, &sizes, &args->q,
                                        &args->k, &args->v, &args->out));
  const Argument q{kOp, "q", *call.q};
  TIERCEL_RETURN_IF_ERROR(check_numbers(call, sizes, q));
  TIERCEL_RETURN_IF_ERROR(lay_out_sequences(call, sizes, q, args));
  TIERCEL_RETURN_IF_ERROR(check_state("initial_state", call.initial_state, args->count, sizes, q));
  TIERCEL_RETURN_IF_ERROR(check_state("final_state", call.final_state, args->count, sizes, q));
  if (call.q->dtype != DType::kBFloat16) {
    return Status::Unimplemented(std::string(kOp) + ": only bfloat16 is supported");
  }
  const auto of_size = [&](const DeltaRuleKernel* (*list)(int*)) {
    const DeltaRuleKernel* found = KernelTable(list).find(
        [&](const DeltaRuleKernel& one) { return one.key_size == sizes.key_size; });
    return found == nullptr ? nullptr : &found->kernel;
  };
  const Kernel* chunks = of_size(delta_chunks_kernels);
  if (chunks == nullptr) {
    return Status::Unimplemented(std::string(kOp) +
                                 ": keys of 64 or 128 elements are supported, got " +
                                 std::to_string(sizes.key_size));
  }
  if (sizes.value_size % kDeltaWarpColumns != 0) {
    return Status::Unimplemented(std::string(kOp) +
                                 ": values of a multiple of 16 elements are supported, got " +
                                 std::to_string(sizes.value_size));
  }
  args->g = static_cast<const float*>(call.g->data);
  args->beta = static_cast<const char*>(call.beta->data);
  args->beta_float = call.beta->dtype == DType::kFloat32;
  args->initial_state =
      call.initial_state == nullptr ? nullptr : static_cast<const float*>(call.initial_state->data);
  args->final_state =
      call.final_state == nullptr ? nullptr : static_cast<float*>(call.final_state->data);
  args->scale = delta_scale(call.scale, sizes.key_size);
  args->l2norm = call.qk_l2norm;
  args->k_heads = static_cast<int>(sizes.k_heads);
  args->v_heads = static_cast<int>(sizes.v_heads);
  args->value_size = static_cast<int>(sizes.value_size);
  if (sizes.v_heads == 0 || sizes.value_size == 0) return Status();
  const int64_t places = args->tokens == 0 ? 0 : ceil_div(args->tokens, kDeltaChunk) + args->count;
  const int warps = choose_warps(sizes, args->count);
  plan->grid = args->count * sizes.v_heads * (sizes.value_size / (kDeltaWarpColumns * warps));
  plan->chunk_grid = places;
  if (plan->grid > INT32_MAX || places > INT32_MAX || sizes.k_heads > 65535) {
    return Status::Unimplemented(std::string(kOp) + ": too many tokens or heads for one launch");
  }
  const int64_t matrices = places * sizes.v_heads * 2 * kDeltaMatrixBytes;
  plan->workspace = matrices / 4 + places * sizes.v_heads * kDeltaFactors;
  plan->warps = warps;
  plan->dynamic_smem = static_cast<unsigned>(
      kDeltaStages * delta_rule_stage(static_cast<int>(sizes.key_size), warps));
  if (places > 0) kernels->chunks = chunks, plan->chunks = chunks->name();
  if (plan->grid > 0 && (places > 0 || args->final_state != nullptr)) {
    kernels->rule = of_size(delta_rule_kernels);
    plan->kernel = kernels->rule->name();
  }
  if (call.workspace == nullptr) return Status();
  const Argument workspace{kOp, "workspace", *call.workspace};
  TIERCEL_RETURN_IF_ERROR(check_dtype(workspace, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_rank(workspace, 1));
  if (workspace.view.shape[0] < plan->workspace) {
    return Status::InvalidArgument(mismatch(workspace,
                                            "have " + std::to_string(plan->workspace) + " elements",
                                            std::to_string(workspace.view.shape[0])));
  }
  TIERCEL_RETURN_IF_ERROR(check_contiguous(workspace));
  TIERCEL_RETURN_IF_ERROR(delta_check_place(workspace, q));
  args->matrices = static_cast<char*>(workspace.view.data);
  args->factors = reinterpret_cast<float*>(args->matrices + matrices);
  return Status();
}

}  // namespace

Status delta_rule_plan(const DeltaRuleCall& call, DeltaRulePlan* plan) {
  DeltaRuleArgs args{};
  Kernels kernels;
  return prepare(call, &args, plan, &kernels);
}

Status delta_rule(const DeltaRuleCall& call, void* stream) {
  DeltaRuleArgs args{};
  DeltaRulePlan plan;
  Kernels kernels;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &plan, &kernels));
  void* arguments[] = {&args};
  LaunchConfig config;
  config.dependent = true;
  if (kernels.chunks != nullptr) {
    config.grid = {static_cast<uint32_t>(plan.chunk_grid), static_cast<uint32_t>(args.k_heads), 1};
    config.block.x = kDeltaChunkThreads;
    config.dynamic_smem =
        static_cast<uint32_t>(delta_chunks_smem(static_cast<int>(call.q->shape[3])));
    TIERCEL_RETURN_IF_ERROR(
        kernels.chunks->launch(config, call.q->device_index, stream, arguments));
  }
  if (kernels.rule == nullptr) return Status();
  config.grid = {static_cast<uint32_t>(plan.grid), 1, 1};
  config.block.x = static_cast<uint32_t>(plan.warps) * 32 + kDeltaLoaders;
  config.dynamic_smem = plan.dynamic_smem;
  return kernels.rule->launch(config, call.q->device_index, stream, arguments);
}

}  // namespace tiercel
