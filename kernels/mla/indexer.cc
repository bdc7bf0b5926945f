// SPDX-License-Identifier: Apache-2.0
#include "kernels/mla/indexer.h"

#include <algorithm>
#include <string>

#include "kernels/mla/indexer_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"
#include "kernels/sm90/tensor_map.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "indexer_logits";
constexpr int64_t kMost = 0x7fffffff;
constexpr int64_t kLeastTiles = 8;   // of a block
constexpr int64_t kMostTiles = 128;  // of a block
constexpr int64_t kMostParts = 65535;

Status check(const IndexerCall& call) {
  const Argument q{kOp, "q", *call.q}, k{kOp, "k", *call.k}, out{kOp, "out", *call.out};
  const Argument k_scale{kOp, "k_scale", *call.k_scale}, weights{kOp, "weights", *call.weights};
  TIERCEL_RETURN_IF_ERROR(check_rank(q, 3));
  TIERCEL_RETURN_IF_ERROR(check_dtype(q, {DType::kFloat8E4M3}));
  TIERCEL_RETURN_IF_ERROR(check_rank(k, 2));
  TIERCEL_RETURN_IF_ERROR(check_dtype(k, {DType::kFloat8E4M3}));
  const int64_t tokens = q.view.shape[0], heads = q.view.shape[1], keys = k.view.shape[0];
  TIERCEL_RETURN_IF_ERROR(check_shape(k, {keys, q.view.shape[2]}, "[K, D]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(k_scale, {keys}, "[K]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(weights, {tokens, heads}, "[T, H]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(out, {tokens, keys}, "[T, K]"));
  TIERCEL_RETURN_IF_ERROR(check_cuda(q));
  for (const Argument* argument : {&k_scale, &weights, &out}) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(*argument, {DType::kFloat32}));
  }
  for (const Argument* argument : {&k, &k_scale, &weights, &out}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(*argument, q));
    TIERCEL_RETURN_IF_ERROR(check_cuda(*argument));
  }
  const auto check_bound = [&](const char* name, const TensorView* view) {
    if (view == nullptr) return Status();
    const Argument bound{kOp, name, *view};
    TIERCEL_RETURN_IF_ERROR(check_dtype(bound, {DType::kInt32}));
    TIERCEL_RETURN_IF_ERROR(check_shape(bound, {tokens}, "[T]"));
    TIERCEL_RETURN_IF_ERROR(check_same_device(bound, q));
    return check_cuda(bound);
  };
  TIERCEL_RETURN_IF_ERROR(check_bound("starts", call.starts));
  return check_bound("ends", call.ends);
}

Status refuse(const Argument& argument, const std::string& expected, const std::string& got) {
  return Status::Unimplemented(mismatch(argument, expected + " for the precompiled kernels", got));
}

Status check_rows(const Argument& argument) {
  const TensorView& view = argument.view;
  const int last = view.ndim - 1;
  if (view.shape[last] <= 1 || view.strides[last] == 1) return Status();
  return refuse(argument, "have contiguous rows", "strides " + shape_text(view.strides, view.ndim));
}

TensorMapSpec map_of(uint32_t rows) {
  return {
      2, {rows, kIndexerColumns}, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
}

// The queries as rows, tokens times heads.
struct Queries {
  explicit Queries(const TensorView& from)
      : view(from), shape{from.shape[0] * from.shape[1], from.shape[2]}, strides{from.shape[2], 1} {
    view.ndim = 2;
    view.shape = shape;
    view.strides = strides;
  }
  Queries(const Queries&) = delete;
  Queries& operator=(const Queries&) = delete;

  TensorView view;
  int64_t shape[2];
  int64_t strides[2];
};

const IndexerKernel* indexer_kernel(int64_t heads) {
  return KernelTable(indexer_kernels).find([&](const auto& each) { return each.heads == heads; });
}

Status prepare(const IndexerCall& call, int multiprocessors, IndexerArgs* args, IndexerPlan* plan) {
  TIERCEL_RETURN_IF_ERROR(check(call));
  *plan = {"none", 0, 0, 0, 0, 0};
  const Argument q{kOp, "q", *call.q};
  const int64_t tokens = q.view.shape[0], heads = q.view.shape[1], keys = call.k->shape[0];
  if (tokens * keys == 0) return Status();
  if (q.view.shape[2] != kIndexerColumns || indexer_kernel(heads) == nullptr) {
    return refuse(q, "have 32 or 64 heads of 128 columns", "shape " + shape_text(q.view.shape, 3));
  }
  if (tokens > kMost / heads || keys > kMost - kIndexerKeys) {
    return Status::Unimplemented(std::string(kOp) + ": too large for one launch, got shape " +
                                 shape_text(call.out->shape, 2));
  }
  for (const Argument& each : {q, Argument{kOp, "k_scale", *call.k_scale}}) {
    TIERCEL_RETURN_IF_ERROR(check_contiguous(each));
  }
  TIERCEL_RETURN_IF_ERROR(check_rows({kOp, "weights", *call.weights}));
  TIERCEL_RETURN_IF_ERROR(check_rows({kOp, "out", *call.out}));
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(map_of(kIndexerRows), Queries(q.view).view, kOp, "q"));
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(map_of(kIndexerKeys), *call.k, kOp, "k"));
  args->k_scale = static_cast<const float*>(call.k_scale->data);
  args->weights = static_cast<const float*>(call.weights->data);
  args->out = static_cast<float*>(call.out->data);
  args->weights_stride = call.weights->strides[0];
  args->out_stride = call.out->strides[0];
  if (call.starts != nullptr) {
    args->starts = static_cast<const int32_t*>(call.starts->data);
    args->starts_step = call.starts->strides[0];
  }
  if (call.ends != nullptr) {
    args->ends = static_cast<const int32_t*>(call.ends->data);
    args->ends_step = call.ends->strides[0];
  }
  args->tokens = static_cast<int>(tokens);
  args->keys = static_cast<int>(keys);
  // Parts of the keys are long where tokens fill the device, and short where they do not.
  const int64_t blocks = ceil_div(tokens * heads, kIndexerRows), all = ceil_div(keys, kIndexerKeys);
  const int64_t wanted = ceil_div(blocks * all, std::max(multiprocessors, 1));
  const int64_t tiles =
      std::max(std::clamp(wanted, kLeastTiles, kMostTiles), ceil_div(all, kMostParts));
  args->tiles = static_cast<int>(tiles);
  *plan = {indexer_kernel(heads)->kernel.name(),
           static_cast<unsigned>(blocks),
           static_cast<unsigned>(ceil_div(all, tiles)),
           kIndexerThreads,
           args->tiles,
           kIndexerShared};
  return Status();
}

}  // namespace

Status indexer_logits_plan(const IndexerCall& call, int multiprocessors, IndexerPlan* plan) {
  IndexerArgs args{};
  return prepare(call, multiprocessors, &args, plan);
}

Status indexer_logits(const IndexerCall& call, void* stream) {
  IndexerArgs args{};
  IndexerPlan plan;
  int multiprocessors = 0;
  const int device = call.q->device_index;
  if (call.q->device_type == DeviceType::kCUDA) {
    TIERCEL_RETURN_IF_ERROR(multiprocessor_count(device, &multiprocessors));
  }
  TIERCEL_RETURN_IF_ERROR(prepare(call, multiprocessors, &args, &plan));
  if (plan.grid_x == 0) return Status();
  CUtensorMap q_map, k_map;
  TIERCEL_RETURN_IF_ERROR(
      encode_tensor_map(map_of(kIndexerRows), Queries(*call.q).view, kOp, "q", &q_map));
  TIERCEL_RETURN_IF_ERROR(encode_tensor_map(map_of(kIndexerKeys), *call.k, kOp, "k", &k_map));
  LaunchConfig config;
  config.grid.x = plan.grid_x;
  config.grid.y = plan.grid_y;
  config.block.x = plan.block;
  config.dynamic_smem = plan.dynamic_smem;
  config.dependent = true;
  void* pointers[] = {&args, &q_map, &k_map};
  return indexer_kernel(call.q->shape[1])->kernel.launch(config, device, stream, pointers);
}

}  // namespace tiercel
