// SPDX-License-Identifier: Apache-2.0
#include "kernels/mla/mla_cache_write.h"

#include <algorithm>
#include <string>

#include "kernels/mla/mla_cache_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "mla_cache_write";

MlaLayout layout_of(const MlaCacheCall& call) {
  switch (call.kv_cache->dtype) {
    case DType::kFloat8E4M3:
      return MlaLayout::kFloat8;
    case DType::kUInt8:
      return MlaLayout::kPacked;
    default:
      return MlaLayout::kSame;
  }
}

Status check_rotation(const MlaCacheCall& call, const Argument& latent) {
  if (call.positions == nullptr && call.angles == nullptr) return Status();
  if (call.positions == nullptr || call.angles == nullptr) {
    const bool lacks = call.positions == nullptr;
    return Status::InvalidArgument(
        std::string(kOp) + ": `" + (lacks ? "positions" : "cos_sin_cache") +
        "` must be a tensor with `" + (lacks ? "cos_sin_cache" : "positions") + "`, got None");
  }
  const Argument positions{kOp, "positions", *call.positions};
  const Argument angles{kOp, "cos_sin_cache", *call.angles};
  const int64_t tokens = call.latent->shape[0], turned = call.rotary->shape[1];
  TIERCEL_RETURN_IF_ERROR(check_dtype(positions, {DType::kInt32, DType::kInt64}));
  TIERCEL_RETURN_IF_ERROR(check_shape(positions, {tokens}, "[T]"));
  TIERCEL_RETURN_IF_ERROR(check_rank(angles, 2));
  if (angles.view.dtype != DType::kFloat32) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(angles, {DType::kFloat32, latent.view.dtype}));
  }
  TIERCEL_RETURN_IF_ERROR(check_shape(angles, {angles.view.shape[0], turned}, "[P, R]"));
  if (angles.view.shape[0] == 0 && tokens > 0) {
    return Status::InvalidArgument(
        mismatch(angles, "have at least one row", shape_text(angles.view.shape, 2)));
  }
  for (const Argument* argument : {&positions, &angles}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(*argument, latent));
    TIERCEL_RETURN_IF_ERROR(check_cuda(*argument));
    TIERCEL_RETURN_IF_ERROR(check_contiguous(*argument));
  }
  return Status();
}

Status check(const MlaCacheCall& call) {
  const Argument latent{kOp, "latent", *call.latent}, rotary{kOp, "rotary", *call.rotary};
  const Argument cache{kOp, "kv_cache", *call.kv_cache}, slots{kOp, "slots", *call.slots};
  TIERCEL_RETURN_IF_ERROR(check_rank(latent, 2));
  TIERCEL_RETURN_IF_ERROR(check_dtype(latent, {DType::kBFloat16, DType::kFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_rank(rotary, 2));
  TIERCEL_RETURN_IF_ERROR(check_dtype(rotary, {call.latent->dtype}));
  const int64_t tokens = call.latent->shape[0];
  const int64_t columns = call.latent->shape[1], turned = call.rotary->shape[1];
  TIERCEL_RETURN_IF_ERROR(check_shape(rotary, {tokens, turned}, "[T, R]"));
  TIERCEL_RETURN_IF_ERROR(check_rank(cache, 3));
  if (cache.view.dtype != call.latent->dtype) {
    TIERCEL_RETURN_IF_ERROR(
        check_dtype(cache, {call.latent->dtype, DType::kFloat8E4M3, DType::kUInt8}));
  }
  const MlaLayout layout = layout_of(call);
  const bool packed = layout == MlaLayout::kPacked;
  TIERCEL_RETURN_IF_ERROR(check_shape(
      cache, {cache.view.shape[0], cache.view.shape[1], packed ? kMlaPacked : columns + turned},
      packed ? "[blocks, block size, 656]" : "[blocks, block size, D + R]"));
  if (packed) TIERCEL_RETURN_IF_ERROR(check_dtype(latent, {DType::kBFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(slots, {DType::kInt32, DType::kInt64}));
  TIERCEL_RETURN_IF_ERROR(check_shape(slots, {tokens}, "[T]"));
  TIERCEL_RETURN_IF_ERROR(check_cuda(latent));
  for (const Argument* argument : {&rotary, &cache, &slots}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(*argument, latent));
    TIERCEL_RETURN_IF_ERROR(check_cuda(*argument));
  }
  TIERCEL_RETURN_IF_ERROR(check_contiguous(slots));
  TIERCEL_RETURN_IF_ERROR(check_rotation(call, latent));
  if (call.kv_scale == nullptr) return Status();
  const Argument scale{kOp, "kv_scale", *call.kv_scale};
  if (layout != MlaLayout::kFloat8) {
    return Status::InvalidArgument(
        mismatch(scale, "be None for a cache that is not float8_e4m3fn", "a tensor"));
  }
  TIERCEL_RETURN_IF_ERROR(check_dtype(scale, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(scale, {1}, "[1]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(scale, latent));
  return check_cuda(scale);
}

// The stride of a dimension in bytes; 0 for a dimension of size 1, whose stride may be any number.
int64_t step_along(const TensorView& view, int dimension) {
  return view.shape[dimension] > 1 ? view.strides[dimension] * dtype_bytes(view.dtype) : 0;
}

Status check_layout(const Argument& argument, int64_t bytes) {
  const TensorView& view = argument.view;
  const int last = view.ndim - 1;
  uint64_t all = reinterpret_cast<uintptr_t>(view.data);
  for (int i = 0; i < last; ++i) all |= static_cast<uint64_t>(step_along(view, i));
  if (all % static_cast<uint64_t>(bytes) == 0 && view.strides[last] == 1) return Status();
  return Status::Unimplemented(mismatch(argument,
                                        "have contiguous rows that start at multiples of " +
                                            std::to_string(bytes) +
                                            " bytes for the precompiled kernels",
                                        "strides " + shape_text(view.strides, view.ndim)));
}

Status prepare(const MlaCacheCall& call, MlaCacheArgs* args, MlaCachePlan* plan,
               const Kernel** kernel) {
  TIERCEL_RETURN_IF_ERROR(check(call));
  *plan = {"none", 0, 0};
  const int64_t tokens = call.latent->shape[0], blocks = call.kv_cache->shape[0];
  const int64_t places = call.kv_cache->shape[1];
  if (tokens == 0 || blocks * places == 0) return Status();
  const Argument latent{kOp, "latent", *call.latent}, rotary{kOp, "rotary", *call.rotary};
  if (call.latent->shape[1] != kMlaLatent || call.rotary->shape[1] != kMlaRotary) {
    return Status::Unimplemented(mismatch(
        latent, "have 512 columns, and `rotary` 64, for the precompiled kernels",
        std::to_string(call.latent->shape[1]) + " and " + std::to_string(call.rotary->shape[1])));
  }
  const MlaLayout layout = layout_of(call);
  TIERCEL_RETURN_IF_ERROR(check_layout(latent, 16));
  TIERCEL_RETURN_IF_ERROR(check_layout(rotary, 16));
  TIERCEL_RETURN_IF_ERROR(
      check_layout({kOp, "kv_cache", *call.kv_cache}, layout == MlaLayout::kFloat8 ? 8 : 16));
  constexpr int64_t kMost = 0x7fffffff;
  const int64_t grid = ceil_div(tokens, kMlaCacheWarps);
  if (grid > kMost || places > kMost) {
    return Status::Unimplemented(std::string(kOp) + ": too large for one launch, got shape " +
                                 shape_text(call.latent->shape, 2));
  }
  args->latent = static_cast<const char*>(call.latent->data);
  args->rotary = static_cast<const char*>(call.rotary->data);
  args->cache = static_cast<char*>(call.kv_cache->data);
  args->latent_stride = step_along(*call.latent, 0);
  args->rotary_stride = step_along(*call.rotary, 0);
  args->block_stride = step_along(*call.kv_cache, 0);
  args->place_stride = step_along(*call.kv_cache, 1);
  args->slots = call.slots->data;
  args->wide_slots = call.slots->dtype == DType::kInt64;
  args->scale = call.kv_scale == nullptr ? nullptr : static_cast<const float*>(call.kv_scale->data);
  const bool rotates = call.positions != nullptr;
  if (rotates) {
    args->positions = call.positions->data;
    args->wide_positions = call.positions->dtype == DType::kInt64;
    args->angles = static_cast<const char*>(call.angles->data);
    args->wide_angles = call.angles->dtype == DType::kFloat32;
    args->last_position =
        static_cast<uint32_t>(std::min<int64_t>(call.angles->shape[0] - 1, kMost));
    args->interleaved = call.interleaved;
  }
  args->tokens = tokens;
  args->block_size = static_cast<int>(places);
  // More blocks than 64 bits count may come from a stride of 0.
  args->slot_count = std::min(blocks, INT64_MAX / places) * places;
  *kernel = &KernelTable(mla_cache_kernels)
                 .find([&](const MlaCacheKernel& one) {
                   return one.dtype == call.latent->dtype && one.layout == layout &&
                          one.rotates == rotates;
                 })
                 ->kernel;
  *plan = {(*kernel)->name(), static_cast<unsigned>(grid), 32 * kMlaCacheWarps};
  return Status();
}

}  // namespace

Status mla_cache_write_plan(const MlaCacheCall& call, MlaCachePlan* plan) {
  MlaCacheArgs args{};
  const Kernel* kernel = nullptr;
  return prepare(call, &args, plan, &kernel);
}

Status mla_cache_write(const MlaCacheCall& call, void* stream) {
  MlaCacheArgs args{};
  MlaCachePlan plan;
  const Kernel* kernel = nullptr;
  TIERCEL_RETURN_IF_ERROR(prepare(call, &args, &plan, &kernel));
  if (kernel == nullptr) return Status();
  LaunchConfig config;
  config.grid.x = plan.grid;
  config.block.x = plan.block;
  config.dependent = true;
  void* pointers[] = {&args};
  return kernel->launch(config, call.latent->device_index, stream, pointers);
}

}  // namespace tiercel
