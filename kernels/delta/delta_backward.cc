// SPDX-License-Identifier: Apache-2.0
#include "kernels/delta/delta_backward.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/delta/delta_checks.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr const char* kOp = "gated_delta_rule_backward";

// In this order.
enum Step { kChunks, kTransitions, kScan, kPasses, kGradients, kSteps };

struct Launches {
  const Kernel* kernels[kSteps] = {};
  LaunchConfig configs[kSteps] = {};

  void set(Step at, const Kernel* kernel, int64_t grid, int64_t heads, int threads, int smem) {
    kernels[at] = kernel;
    configs[at].dependent = true;
    configs[at].grid = {static_cast<uint32_t>(grid), static_cast<uint32_t>(heads), 1};
    configs[at].block.x = static_cast<uint32_t>(threads);
    configs[at].dynamic_smem = static_cast<uint32_t>(smem);
  }
};

constexpr int64_t kLeastSegments = 3;  // of a sequence; below, transitions cost what they spare
constexpr int64_t kLeastDivided = 32;  // chunks of a sequence
constexpr int64_t kLeastChunks = 8;    // of a segment

// Blocks of two slices that find what a segment does: forward, to values and by factors; and back.
int64_t transition_parts(const DeltaSizes& sizes) {
  const int64_t slices = ceil_div(sizes.value_size, kDeltaSlice);
  return ceil_div(slices + sizes.key_size / kDeltaSlice, kDeltaGroups);
}

// The length of segments in chunks, if all sequences together leave most multiprocessors idle; 0
// for whole sequences, as always in the batch-invariant mode. The blocks that find what segments do
// run all at once: all but the last segment of a sequence have terms forward, all but the first
// have terms back, and all have factors.
int64_t choose_segments(const DeltaSizes& sizes, int64_t count, int64_t places) {
  if (batch_invariant() || count == 0 || sizes.key_size != kDeltaScanSize) return 0;
  const int64_t chunks = places - count;
  const int64_t terms = ceil_div(ceil_div(sizes.value_size, kDeltaSlice), kDeltaGroups);
  const int64_t of_segment = sizes.v_heads * (transition_parts(sizes) + terms);
  const int64_t spared = sizes.v_heads * count * 2 * terms;
  const int64_t segments = (kDefaultMultiprocessors + spared) / of_segment;
  if (segments < kLeastSegments * count || chunks < kLeastDivided * count) return 0;
  return std::max(kLeastChunks, ceil_div(chunks, segments));
}

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
  *plan = {"none", "none", "none", 0, 0, 0, 0, 0};
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
  args->segment_chunks = choose_segments(sizes, args->count, places);
  const int64_t slots =
      args->segment_chunks == 0 ? args->count : places / args->segment_chunks + args->count;
  // Half of the blocks go forward, half back.
  const int64_t passes = 2 * slots * sizes.v_heads;
  plan->groups = slices > 1 && passes * slices > kDefaultMultiprocessors ? 2 : 1;
  plan->segment_chunks = args->segment_chunks;
  plan->chunk_grid = places;
  plan->pass_grid = passes * ceil_div(slices, plan->groups);
  if (plan->pass_grid > INT32_MAX || places > INT32_MAX || sizes.v_heads > 65535) {
    return Status::Unimplemented(std::string(kOp) + ": too many tokens or heads for one launch");
  }
  if (places > 0) {
    launches->set(kChunks, part(DeltaPart::kBackChunks), places,
                  channels ? sizes.v_heads : delta_chunk_rows(sizes, places),
                  channels ? kDeltaChannelThreads : kDeltaChunkThreads,
                  channels ? delta_channels_smem(key_size) : delta_chunks_smem(key_size, false));
    launches->set(
        kGradients, part(DeltaPart::kGradients), places, sizes.k_heads, kDeltaGradientThreads,
        channels ? delta_channel_gradients_smem(key_size) : delta_gradients_smem(key_size));
    plan->chunks = launches->kernels[kChunks]->name();
    plan->gradients = launches->kernels[kGradients]->name();
  }
  if (plan->pass_grid > 0 && (places > 0 || args->grad_initial != nullptr)) {
    const auto set = [&](Step step, int64_t grid, int groups) {
      launches->set(step, part(DeltaPart::kBackPasses), grid, 1, groups * 128 + kDeltaLoaders,
                    delta_back_smem(key_size, channels, groups));
    };
    if (args->segment_chunks > 0) {
      set(kTransitions, passes * transition_parts(sizes), kDeltaGroups);
      launches->set(kScan, part(DeltaPart::kBackScan),
                    2 * args->count * sizes.v_heads * (sizes.value_size / kDeltaScanColumns), 1,
                    kDeltaScanThreads, kDeltaScanSmem);
    }
    set(kPasses, plan->pass_grid, plan->groups);
    plan->passes = launches->kernels[kPasses]->name();
  }
  // Parts of the workspace, in elements of four bytes.
  const int64_t pairs = places * sizes.v_heads;
  const int64_t matrices = pairs * 2 * kDeltaMatrixBytes / 4;
  const int64_t factors = pairs * kDeltaBackFactors;
  const int64_t states = pairs * key_size * sizes.value_size / 2;
  const int64_t values = pairs * kDeltaChunk * sizes.value_size / 2;
  const int64_t tiles = channels ? pairs * 3 * kDeltaChunk * key_size / 2 : 0;
  const int64_t products = channels ? pairs * kDeltaMatrixBytes / 4 : 0;
  const int64_t rows = args->segment_chunks > 0 ? slots * sizes.v_heads * key_size : 0;
  const int64_t of_segments = rows * sizes.value_size, transitions = of_segments + rows * key_size;
  plan->workspace = matrices + factors + tiles + products + 2 * states + 3 * values + transitions +
                    2 * of_segments;
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
  args->transitions = reinterpret_cast<float*>(take(transitions));
  args->segment_states = reinterpret_cast<float*>(take(of_segments));
  args->segment_grads = reinterpret_cast<float*>(take(of_segments));
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
  for (int i = 0; i < kSteps; ++i) {
    if (launches.kernels[i] == nullptr) continue;
    args.transition = i == kTransitions;
    void* arguments[] = {i == kChunks ? static_cast<void*>(&rule) : &args};
    TIERCEL_RETURN_IF_ERROR(launches.kernels[i]->launch(
        launches.configs[i], call.rule.q->device_index, stream, arguments));
  }
  return Status();
}

}  // namespace tiercel
