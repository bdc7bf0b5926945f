// SPDX-License-Identifier: Apache-2.0
#include "kernels/delta/delta_rule.h"

#include <algorithm>
#include <string>

#include "kernels/delta/delta_checks.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr const char* kOp = "gated_delta_rule";

// The launches of a call, in order; null: none.
struct Launches {
  const Kernel* kernels[5] = {};
  LaunchConfig configs[5] = {};

  void set(DeltaPart part, const Kernel& kernel, int64_t grid, int64_t heads, int threads,
           int smem) {
    const int at = static_cast<int>(part);
    kernels[at] = &kernel;
    configs[at].dependent = true;
    configs[at].grid = {static_cast<uint32_t>(grid), static_cast<uint32_t>(heads), 1};
    configs[at].block.x = static_cast<uint32_t>(threads);
    configs[at].dynamic_smem = static_cast<uint32_t>(smem);
  }
};

constexpr int64_t kLeastSegments = 3;  // below, a second pass costs more than it spares
constexpr int64_t kLeastChunks = 8;    // of a segment
constexpr int64_t kLongSegment = 128;  // chunks

// The launch of the last kernel.
struct Shape {
  int64_t segment_chunks;
  int groups;      // slices of a state that share a block
  int64_t slots;   // segments, or sequences
  int64_t blocks;  // of the last kernel
  int64_t beside;  // blocks of the first kernel that run beside those; 0: one waits for the other
};

// Sets the length of segments and how many slices share a block, if all sequences together leave
// most multiprocessors idle; not in the batch-invariant mode.
void divide(const DeltaSizes& sizes, int64_t count, int64_t places, Shape* shape) {
  const int64_t chunks = places - count;
  if (batch_invariant() || sizes.key_size != kDeltaScanSize) return;
  if (count == 0 || chunks < kLeastSegments * kLeastChunks * count) return;
  const int64_t slices = ceil_div(sizes.value_size, kDeltaSlice);
  const int64_t segments = kDefaultMultiprocessors / (sizes.v_heads * slices);
  if (segments < kLeastSegments * count) return;
  shape->segment_chunks = std::max(kLeastChunks, ceil_div(chunks, segments));
  // Two slices in a block take less time than twice the segment, which finding what segments do
  // takes up unless they are long.
  if (slices > 1 && shape->segment_chunks >= kLongSegment) {
    shape->groups = 2;
    shape->segment_chunks = ceil_div(chunks, 2 * segments);
  }
}

Shape choose_shape(const DeltaSizes& sizes, int64_t count, int64_t places, bool channels) {
  Shape shape{};
  const int64_t slices = ceil_div(sizes.value_size, kDeltaSlice), states = count * sizes.v_heads;
  // Two slices in a block share keys, queries and matrices.
  shape.groups = slices > 1 && states * slices > kDefaultMultiprocessors ? 2 : 1;
  divide(sizes, count, places, &shape);
  shape.slots = shape.segment_chunks == 0 ? count : places / shape.segment_chunks + count;
  // A state goes through its chunks one after another, on one multiprocessor. If that leaves half
  // of them idle, the first kernel runs there meanwhile: with a gate per head it then takes less
  // time than the states. If all chunks fit at once, there is nothing to wait for.
  constexpr int64_t kHalf = kDefaultMultiprocessors / 2;
  const int64_t items = count == 0 ? 0 : round_up(places, count) * sizes.k_heads;
  const bool many = items > kDefaultMultiprocessors * kDeltaChunkTeams && items <= INT32_MAX;
  const bool apart = channels || shape.segment_chunks > 0 || !many;
  if (!apart && states * slices > kHalf && states * ceil_div(slices, 2) <= kHalf) shape.groups = 2;
  shape.blocks = shape.slots * sizes.v_heads * ceil_div(slices, shape.groups);
  if (!apart && shape.blocks > 0 && shape.blocks <= kHalf) {
    shape.beside = kDefaultMultiprocessors - shape.blocks;
  }
  return shape;
}

Status prepare(const DeltaRuleCall& call, DeltaRuleArgs* args, DeltaRulePlan* plan,
               Launches* launches) {
  *plan = {"none", "none", 0, 0, 0, 0, 0, 0, 0, 0};
  DeltaSizes sizes;
  TIERCEL_RETURN_IF_ERROR(delta_lay_out(kOp, {call.q, call.k, call.v, call.beta, call.out},
                                        {DType::kBFloat16, DType::kFloat16}, &sizes, &args->q,
                                        &args->k, &args->v, &args->out));
  const Argument q{kOp, "q", *call.q};
  TIERCEL_RETURN_IF_ERROR(delta_check_gates(kOp, *call.g, sizes, q));
  TIERCEL_RETURN_IF_ERROR(delta_lay_out_sequences(kOp, call.cu_seqlens, sizes, q, args));
  TIERCEL_RETURN_IF_ERROR(
      delta_check_state(kOp, "initial_state", call.initial_state, args->count, sizes, q));
  TIERCEL_RETURN_IF_ERROR(
      delta_check_state(kOp, "final_state", call.final_state, args->count, sizes, q));
  const bool channels = call.g->ndim == 4;
  const auto part = [&](DeltaPart one) {
    return delta_find_kernel(one, sizes.key_size, call.q->dtype, channels);
  };
  const Kernel* chunks = part(DeltaPart::kChunks);
  if (chunks == nullptr) {
    return Status::Unimplemented(std::string(kOp) +
                                 ": keys of 64 or 128 elements are supported, got " +
                                 std::to_string(sizes.key_size));
  }
  if (sizes.value_size % 16 != 0) {
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
  const int key_size = static_cast<int>(sizes.key_size);
  const int64_t places = args->tokens == 0 ? 0 : ceil_div(args->tokens, kDeltaChunk) + args->count;
  const int64_t slices = ceil_div(sizes.value_size, kDeltaSlice);
  const Shape shape = choose_shape(sizes, args->count, places, channels);
  const int groups = shape.groups;
  const int64_t slots = shape.slots;
  args->segment_chunks = shape.segment_chunks;
  args->places = places;
  plan->grid = shape.blocks;
  plan->chunk_grid = places;
  plan->chunk_rows = channels ? sizes.v_heads : delta_chunk_rows(sizes, places);
  plan->beside = shape.beside;
  plan->groups = groups;
  plan->segment_chunks = args->segment_chunks;
  plan->dynamic_smem = static_cast<unsigned>(delta_rule_smem(key_size, channels, groups));
  const int64_t scan_grid = args->count * sizes.v_heads * (sizes.value_size / kDeltaScanColumns);
  if (std::max(plan->grid, scan_grid) > INT32_MAX || places > INT32_MAX || sizes.v_heads > 65535) {
    return Status::Unimplemented(std::string(kOp) + ": too many tokens or heads for one launch");
  }
  if (places > 0) {
    if (shape.beside > 0) {
      chunks = part(DeltaPart::kStayingChunks);
      launches->set(DeltaPart::kStayingChunks, *chunks, shape.beside, 1, kDeltaChunkThreads,
                    kDeltaChunkTeams * delta_chunks_smem(key_size, true));
      launches->configs[static_cast<int>(DeltaPart::kStayingChunks)].block.y = kDeltaChunkTeams;
    } else {
      launches->set(DeltaPart::kChunks, *chunks, places, plan->chunk_rows,
                    channels ? kDeltaChannelThreads : kDeltaChunkThreads,
                    channels ? delta_channels_smem(key_size) : delta_chunks_smem(key_size, false));
    }
    plan->chunks = chunks->name();
  }
  if (plan->grid > 0 && (places > 0 || args->final_state != nullptr)) {
    const auto threads = [](int of) { return of * 128 + kDeltaLoaders; };
    if (args->segment_chunks > 0) {
      const int64_t parts = ceil_div(slices + key_size / kDeltaSlice, kDeltaGroups);
      launches->set(DeltaPart::kTransitions, *part(DeltaPart::kTransitions),
                    slots * sizes.v_heads * parts, 1, threads(kDeltaGroups),
                    delta_rule_smem(key_size, channels, kDeltaGroups));
      launches->set(DeltaPart::kScan, *part(DeltaPart::kScan), scan_grid, 1, kDeltaScanThreads,
                    kDeltaScanSmem);
    }
    launches->set(DeltaPart::kRule, *part(DeltaPart::kRule), plan->grid, 1, threads(groups),
                  static_cast<int>(plan->dynamic_smem));
    plan->kernel = launches->kernels[static_cast<int>(DeltaPart::kRule)]->name();
  }
  // Parts of the workspace, in elements of four bytes.
  const int64_t pairs = places * sizes.v_heads;
  const int64_t matrices = pairs * 2 * kDeltaMatrixBytes / 4;
  const int64_t factors = pairs * kDeltaFactors;
  const int64_t tiles = channels ? pairs * 3 * kDeltaChunk * key_size / 2 : 0;
  const int64_t states = args->segment_chunks > 0 ? slots * sizes.v_heads * key_size : 0;
  const int64_t transitions = states * (sizes.value_size + key_size);
  const int64_t flags = shape.beside > 0           ? places * sizes.k_heads
                        : args->segment_chunks > 0 ? slots * sizes.v_heads
                                                   : 0;
  plan->workspace = matrices + factors + tiles + transitions + states * sizes.value_size + flags;
  if (call.workspace == nullptr) return Status();
  TIERCEL_RETURN_IF_ERROR(delta_check_workspace(kOp, *call.workspace, plan->workspace, q));
  auto* const begin = static_cast<float*>(call.workspace->data);
  args->matrices = reinterpret_cast<char*>(begin);
  args->factors = begin + matrices;
  args->tiles = reinterpret_cast<char*>(args->factors + factors);
  args->transitions = args->factors + factors + tiles;
  args->segment_states = args->transitions + transitions;
  auto* const numbers = reinterpret_cast<int*>(args->segment_states + states * sizes.value_size);
  if (shape.beside > 0) args->ready = numbers;
  if (args->segment_chunks > 0) args->lost = numbers;
  return Status();
}

}  // namespace

Status delta_rule_plan(const DeltaRuleCall& call, DeltaRulePlan* plan) {
  DeltaRuleArgs args{};
  Launches launches;
  return prepare(call, &args, plan, &launches);
}

Status delta_rule(const DeltaRuleCall& call, void* stream) {
  DeltaRuleArgs args{};
  DeltaRulePlan plan;
  Launches launches;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &plan, &launches));
  void* arguments[] = {&args};
  for (int i = 0; i < 5; ++i) {
    if (launches.kernels[i] == nullptr) continue;
    TIERCEL_RETURN_IF_ERROR(
        launches.kernels[i]->launch(launches.configs[i], call.q->device_index, stream, arguments));
  }
  return Status();
}

}  // namespace tiercel
