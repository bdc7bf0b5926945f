// SPDX-License-Identifier: Apache-2.0
#include "kernels/delta/delta_decode.h"

#include <algorithm>
#include <string>

#include "kernels/delta/delta_checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr const char* kOp = "gated_delta_rule_decode";
constexpr int64_t kStreamFrom = 2 * kDefaultMultiprocessors;  // heads of sequences

Status lay_out_states(const DeltaDecodeCall& call, const DeltaSizes& sizes, const Argument& q,
                      DeltaDecodeArgs* args) {
  const Argument states{kOp, "states", *call.states};
  TIERCEL_RETURN_IF_ERROR(check_dtype(states, {DType::kFloat32, DType::kBFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_rank(states, 4));
  const TensorView& view = states.view;
  TIERCEL_RETURN_IF_ERROR(
      check_shape(states, {view.shape[0], sizes.v_heads, sizes.key_size, sizes.value_size},
                  "[slots, Hv, K, V]"));
  TIERCEL_RETURN_IF_ERROR(delta_check_place(states, q));
  const int64_t bytes = dtype_bytes(view.dtype);
  const int64_t* strides = view.strides;
  // The stride of a dimension of size 1 means nothing.
  const int64_t slot = view.shape[0] > 1 ? strides[0] : 0;
  if (strides[3] != 1 || strides[2] != sizes.value_size ||
      (sizes.v_heads > 1 && strides[1] != sizes.key_size * sizes.value_size) ||
      slot * bytes % 16 != 0 || reinterpret_cast<uintptr_t>(view.data) % 16 != 0) {
    return Status::Unimplemented(std::string(kOp) +
                                 ": each of `states` must be contiguous and aligned to 16 bytes");
  }
  args->states = static_cast<char*>(view.data);
  args->slots = view.shape[0];
  args->slot_stride = slot * bytes;
  args->columns = 1;
  if (call.state_indices == nullptr) return Status();
  const Argument indices{kOp, "state_indices", *call.state_indices};
  TIERCEL_RETURN_IF_ERROR(check_dtype(indices, {DType::kInt32}));
  const int rank = indices.view.ndim;
  const int64_t columns = rank == 2 ? indices.view.shape[1] : 1;
  if ((rank != 1 && rank != 2) || indices.view.shape[0] != sizes.batch ||
      (columns != 1 && columns != sizes.tokens)) {
    return Status::InvalidArgument(
        mismatch(indices, "have shape [B] or [B, T]", shape_text(indices.view.shape, rank)));
  }
  TIERCEL_RETURN_IF_ERROR(check_contiguous(indices));
  TIERCEL_RETURN_IF_ERROR(delta_check_place(indices, q));
  args->indices = static_cast<const int*>(indices.view.data);
  args->columns = static_cast<int>(columns);
  return Status();
}

Status prepare(const DeltaDecodeCall& call, DeltaDecodeArgs* args, DeltaDecodePlan* plan,
               const Kernel** kernel) {
  *plan = {"none", 0, 0, 0};
  DeltaSizes sizes;
  TIERCEL_RETURN_IF_ERROR(delta_lay_out(kOp, {call.q, call.k, call.v, call.beta, call.out},
                                        {DType::kBFloat16, DType::kFloat16}, &sizes, &args->q,
                                        &args->k, &args->v, &args->out));
  const Argument q{kOp, "q", *call.q}, g{kOp, "g", *call.g};
  TIERCEL_RETURN_IF_ERROR(check_dtype(g, {DType::kFloat32}));
  args->per_channel = call.g->ndim == 4;
  if (args->per_channel) {
    TIERCEL_RETURN_IF_ERROR(check_shape(
        g, {sizes.batch, sizes.tokens, sizes.v_heads, sizes.key_size}, "[B, T, Hv, K]"));
  } else {
    TIERCEL_RETURN_IF_ERROR(
        check_shape(g, {sizes.batch, sizes.tokens, sizes.v_heads}, "[B, T, Hv]"));
  }
  TIERCEL_RETURN_IF_ERROR(check_contiguous(g));
  TIERCEL_RETURN_IF_ERROR(delta_check_place(g, q));
  TIERCEL_RETURN_IF_ERROR(lay_out_states(call, sizes, q, args));
  if (call.accepted != nullptr) {
    const Argument accepted{kOp, "accepted", *call.accepted};
    TIERCEL_RETURN_IF_ERROR(check_dtype(accepted, {DType::kInt32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(accepted, {sizes.batch}, "[B]"));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(accepted));
    TIERCEL_RETURN_IF_ERROR(delta_check_place(accepted, q));
    args->accepted = static_cast<const int*>(accepted.view.data);
  }
  // Blocks that stay gain where each goes through several states, of a token each.
  const bool stream = sizes.tokens == 1 && sizes.key_size == kDeltaStreamSize &&
                      sizes.value_size == kDeltaStreamSize &&
                      sizes.batch * sizes.v_heads > kStreamFrom;
  const DeltaDecodeKernel* found = KernelTable(delta_decode_kernels).find([&](const auto& one) {
    return one.state == call.states->dtype && one.key_size == sizes.key_size &&
           one.stream == stream;
  });
  if (found == nullptr) {
    return Status::Unimplemented(std::string(kOp) +
                                 ": keys of 64 or 128 elements are supported, got " +
                                 std::to_string(sizes.key_size));
  }
  if (sizes.value_size % kDeltaDecodeColumns != 0) {
    return Status::Unimplemented(std::string(kOp) +
                                 ": values of a multiple of 32 elements are supported, got " +
                                 std::to_string(sizes.value_size));
  }
  args->g = static_cast<const float*>(call.g->data);
  args->beta = static_cast<const char*>(call.beta->data);
  args->beta_float = call.beta->dtype == DType::kFloat32;
  args->float16 = call.q->dtype == DType::kFloat16;
  args->scale = delta_scale(call.scale, sizes.key_size);
  args->l2norm = call.qk_l2norm;
  const int64_t units = sizes.batch * sizes.v_heads;
  const int64_t grid = units * (sizes.value_size / kDeltaDecodeColumns);
  if (grid == 0 || sizes.tokens == 0) return Status();
  if (grid > INT32_MAX || sizes.tokens > INT32_MAX || sizes.value_size > INT32_MAX) {
    return Status::Unimplemented(std::string(kOp) + ": too many heads or tokens for one launch");
  }
  args->tokens = static_cast<int>(sizes.tokens);
  args->k_heads = static_cast<int>(sizes.k_heads);
  args->v_heads = static_cast<int>(sizes.v_heads);
  args->value_size = static_cast<int>(sizes.value_size);
  args->sequences = static_cast<int>(sizes.batch);
  *kernel = &found->kernel;
  *plan = {(*kernel)->name(), static_cast<unsigned>(grid), kDeltaDecodeThreads, 0};
  if (stream) {
    plan->grid = static_cast<unsigned>(std::min<int64_t>(units, kDefaultMultiprocessors));
    plan->block = kDeltaStreamThreads;
    plan->dynamic_smem =
        static_cast<unsigned>(delta_stream_smem(static_cast<int>(dtype_bytes(found->state))));
  }
  return Status();
}

}  // namespace

Status delta_decode_plan(const DeltaDecodeCall& call, DeltaDecodePlan* plan) {
  DeltaDecodeArgs args{};
  const Kernel* kernel = nullptr;
  return prepare(call, &args, plan, &kernel);
}

Status delta_decode(const DeltaDecodeCall& call, void* stream) {
  DeltaDecodeArgs args{};
  DeltaDecodePlan plan;
  const Kernel* kernel = nullptr;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &plan, &kernel));
  if (kernel == nullptr) return Status();
  LaunchConfig config;
  config.grid.x = plan.grid;
  config.block.x = plan.block;
  config.dynamic_smem = plan.dynamic_smem;
  config.dependent = true;
  void* arguments[] = {&args};
  return kernel->launch(config, call.q->device_index, stream, arguments);
}

}  // namespace tiercel
