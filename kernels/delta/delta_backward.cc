// SPDX-License-Identifier: Apache-2.0
#include "kernels/delta/delta_backward.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/delta/delta_checks.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr const char* kOp = "gated_delta_rule_backward";

struct Launches {
  const Kernel* kernels[3] = {};
  LaunchConfig configs[3] = {};

  void set(int at, const Kernel* kernel, int64_t grid, int64_t heads, int threads, int smem) {
    kernels[at] = kernel;
    configs[at].dependent = true;
    configs[at].grid = {static_cast<uint32_t>(grid), static_cast<uint32_t>(heads), 1};
    configs[at].block.x = static_cast<uint32_t>(threads);
    configs[at].dynamic_smem = static_cast<uint32_t>(smem);
  }
};

// A gradient, contiguous and like `of`.
Status check_gradient(const char* name, const TensorView& view, const TensorView& of,
                      const char* shape, const Argument& q) {
  const Argument gradient{kOp, name, view};
  TIERCEL_RETURN_IF_ERROR(check_dtype(gradient, {of.dtype}));
  if (of.ndim == 4) {
    TIERCEL_RETURN_IF_ERROR(
        check_shape(gradient, {of.shape[0], of.shape[1], of.shape[2], of.shape[3]}, shape));
  } else {
    TIERCEL_RETURN_IF_ERROR(check_shape(gradient, {of.shape[0], of.shape[1], of.shape[2]}, shape));
  }
  TIERCEL_RETURN_IF_ERROR(check_contiguous(gradient));
  return delta_check_place(gradient, q);
}

// Contiguous heads.
DeltaHeads heads_of(const TensorView& view) {
  const int64_t head = view.shape[3] * dtype_bytes(view.dtype), token = head * view.shape[2];
  return {static_cast<char*>(view.data), token * view.shape[1], token, head};
}

Status prepare(const DeltaBackwardCall& call, DeltaBackArgs* args, DeltaBackwardPlan* plan,
               Launches* launches) {
  *plan = {"none", "none", "none", 0, 0, 0, 0};
  const DeltaRuleCall& rule = call.rule;
  DeltaSizes sizes;
  TIERCEL_RETURN_IF_ERROR(delta_lay_out(kOp, {rule.q, rule.k, rule.v, rule.beta, rule.out, "grad"},
                                        {DType::kBFloat16, DType::kFloat16}, &sizes, &args->q,
                                        &args->k, &args->v, &args->grad));
  const Argument q{kOp, "q", *rule.q};
  TIERCEL_RETURN_IF_ERROR(delta_check_gates(kOp, *rule.g, sizes, q));
  TIERCEL_RETURN_IF_ERROR(delta_lay_out_sequences(kOp, rule.cu_seqlens, sizes, q, args));
  for (const auto& [name, state] : {std::pair{"initial_state", rule.initial_state},
                                    {"grad_final", rule.final_state},
                                    {"grad_initial", call.grad_initial}}) {
    TIERCEL_RETURN_IF_ERROR(delta_check_state(kOp, name, state, args->count, sizes, q));
  }
  const bool channels = rule.g->ndim == 4;
  TIERCEL_RETURN_IF_ERROR(check_gradient("dq", *call.dq, *rule.q, "[B, T, Hk, K]", q));
  TIERCEL_RETURN_IF_ERROR(check_gradient("dk", *call.dk, *rule.k, "[B, T, Hk, K]", q));
  TIERCEL_RETURN_IF_ERROR(check_gradient("dv", *call.dv, *rule.v, "[B, T, Hv, V]", q));
  TIERCEL_RETURN_IF_ERROR(
      check_gradient("dg", *call.dg, *rule.g, channels ? "[B, T, Hv, K]" : "[B, T, Hv]", q));
  TIERCEL_RETURN_IF_ERROR(check_gradient("dbeta", *call.dbeta, *rule.beta, "[B, T, Hv]", q));
  const auto part = [&](DeltaPart one) {
    return delta_find_kernel(one, sizes.key_size, rule.q->dtype, channels);
  };
  if (part(DeltaPart::kGradients) == nullptr) {
    return Status::Unimplemented(std::string(kOp) +
                                 ": keys of 64 or 128 elements are supported, got " +
                                 std::to_string(sizes.key_size));
  }
  if (sizes.value_size % 16 != 0) {
    return Status::Unimplemented(std::string(kOp) +
                                 ": values of a multiple of 16 elements are supported, got " +
                                 std::to_string(sizes.value_size));
  }
  args->g = static_cast<const float*>(rule.g->data);
  args->beta = static_cast<const char*>(rule.beta->data);
  args->beta_float = rule.beta->dtype == DType::kFloat32;
  const auto floats = [](const TensorView* view) {
    return view == nullptr ? nullptr : static_cast<float*>(view->data);
  };
  args->initial_state = floats(rule.initial_state);
  args->grad_final = floats(rule.final_state);
  args->grad_initial = floats(call.grad_initial);
  args->dq = heads_of(*call.dq);
  args->dk = heads_of(*call.dk);
  args->dv = heads_of(*call.dv);
  args->dg = floats(call.dg);
  args->dbeta = static_cast<char*>(call.dbeta->data);
  args->scale = delta_scale(rule.scale, sizes.key_size);
  args->l2norm = rule.qk_l2norm;
  args->k_heads = static_cast<int>(sizes.k_heads);
  args->v_heads = static_cast<int>(sizes.v_heads);
  args->value_size = static_cast<int>(sizes.value_size);
  if (sizes.v_heads == 0 || sizes.value_size == 0) {
    return sizes.k_heads == 0 || args->tokens == 0
               ? Status()
               : Status::Unimplemented(std::string(kOp) + ": `v` is empty and `q` is not");
  }
  const int key_size = static_cast<int>(sizes.key_size);
  const int64_t places = args->tokens == 0 ? 0 : ceil_div(args->tokens, kDeltaChunk) + args->count;
  const int64_t slices = ceil_div(sizes.value_size, kDeltaSlice);
  // Half of the blocks go forward, half back.
  const int64_t passes = 2 * args->count * sizes.v_heads;
  plan->groups = slices > 1 && passes * slices > kDefaultMultiprocessors ? 2 : 1;
  plan->chunk_grid = places;
  plan->pass_grid = passes * ceil_div(slices, plan->groups);
  if (plan->pass_grid > INT32_MAX || places > INT32_MAX || sizes.v_heads > 65535) {
    return Status::Unimplemented(std::string(kOp) + ": too many tokens or heads for one launch");
  }
  if (places > 0) {
    launches->set(0, part(DeltaPart::kBackChunks), places, channels ? sizes.v_heads : sizes.k_heads,
                  kDeltaChunkThreads,
                  channels ? delta_channels_smem(key_size) : delta_chunks_smem(key_size));
    launches->set(
        2, part(DeltaPart::kGradients), places, sizes.k_heads, kDeltaGradientThreads,
        channels ? delta_channel_gradients_smem(key_size) : delta_gradients_smem(key_size));
    plan->chunks = launches->kernels[0]->name();
    plan->gradients = launches->kernels[2]->name();
  }
  if (plan->pass_grid > 0 && (places > 0 || args->grad_initial != nullptr)) {
    launches->set(1, part(DeltaPart::kBackPasses), plan->pass_grid, 1,
                  plan->groups * 128 + kDeltaLoaders,
                  delta_back_smem(key_size, channels, plan->groups));
    plan->passes = launches->kernels[1]->name();
  }
  // Parts of the workspace, in elements of four bytes.
  const int64_t pairs = places * sizes.v_heads;
  const int64_t matrices = pairs * 2 * kDeltaMatrixBytes / 4;
  const int64_t factors = pairs * kDeltaBackFactors;
  const int64_t states = pairs * key_size * sizes.value_size / 2;
  const int64_t values = pairs * kDeltaChunk * sizes.value_size / 2;
  const int64_t tiles = channels ? pairs * 3 * kDeltaChunk * key_size / 2 : 0;
  const int64_t products = channels ? pairs * kDeltaMatrixBytes / 4 : 0;
  plan->workspace = matrices + factors + tiles + products + 2 * states + 3 * values;
  if (rule.workspace == nullptr) return Status();
  TIERCEL_RETURN_IF_ERROR(delta_check_workspace(kOp, *rule.workspace, plan->workspace, q));
  auto* at = static_cast<float*>(rule.workspace->data);
  const auto take = [&](int64_t size) {
    auto* const taken = reinterpret_cast<char*>(at);
    at += size;
    return taken;
  };
  args->matrices = take(matrices);
  args->factors = reinterpret_cast<float*>(take(factors));
  args->tiles = take(tiles);
  args->products = take(products);
  args->states = take(states);
  args->grad_states = take(states);
  args->rest = take(values);
  args->written = take(values);
  args->grad_rest = take(values);
  return Status();
}

}  // namespace

Status delta_backward_plan(const DeltaBackwardCall& call, DeltaBackwardPlan* plan) {
  DeltaBackArgs args{};
  Launches launches;
  return prepare(call, &args, plan, &launches);
}

Status delta_backward(const DeltaBackwardCall& call, void* stream) {
  DeltaBackArgs args{};
  DeltaBackwardPlan plan;
  Launches launches;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &plan, &launches));
  DeltaRuleArgs rule = args;
  for (int i = 0; i < 3; ++i) {
    if (launches.kernels[i] == nullptr) continue;
    void* arguments[] = {i == 0 ? static_cast<void*>(&rule) : &args};
    TIERCEL_RETURN_IF_ERROR(launches.kernels[i]->launch(
        launches.configs[i], call.rule.q->device_index, stream, arguments));
  }
  return Status();
}

}  // namespace tiercel
