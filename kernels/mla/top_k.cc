// SPDX-License-Identifier: Apache-2.0
#include "kernels/mla/top_k.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/mla/top_k_kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "top_k_indices";
constexpr int64_t kMost = 0x7fffffff;
constexpr int64_t kManyElements = 1 << 17;  // less is faster in many small parts

Status check(const TopKCall& call) {
  const Argument logits{kOp, "logits", *call.logits}, out{kOp, "out", *call.out};
  TIERCEL_RETURN_IF_ERROR(check_rank(logits, 2));
  TIERCEL_RETURN_IF_ERROR(check_dtype(logits, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(logits));
  TIERCEL_RETURN_IF_ERROR(check_rank(out, 2));
  TIERCEL_RETURN_IF_ERROR(check_shape(out, {logits.view.shape[0], out.view.shape[1]}, "[T, k]"));
  TIERCEL_RETURN_IF_ERROR(check_dtype(out, {DType::kInt32}));
  TIERCEL_RETURN_IF_ERROR(check_same_device(out, logits));
  TIERCEL_RETURN_IF_ERROR(check_cuda(out));
  TIERCEL_RETURN_IF_ERROR(check_contiguous(out));
  if (call.lengths == nullptr) return Status();
  const Argument lengths{kOp, "lengths", *call.lengths};
  TIERCEL_RETURN_IF_ERROR(check_dtype(lengths, {DType::kInt32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(lengths, {logits.view.shape[0]}, "[T]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(lengths, logits));
  return check_cuda(lengths);
}

// The fewest blocks of a row whose parts have up to `most` elements. Few rows take more, so that
// there are `enough` blocks, unless parts become smaller than `least`.
int blocks_of(int64_t rows, int64_t columns, int64_t enough, int64_t most, int64_t least) {
  int blocks = 1;
  while (blocks < kTopKMostBlocks) {
    const int64_t part = ceil_div(columns, blocks);
    const bool idle = rows * blocks < enough && part > least;
    if (part <= most && !idle) break;
    blocks *= 2;
  }
  return blocks;
}

// Elements of a block.
int64_t part_of(int64_t columns, int blocks) { return ceil_div(columns, 4 * blocks) * 4; }

// Elements that pass a sample's bound should take up little of a row and of the lists, even if all
// of them lie in one part (sampled_bound in top_k_sampled.cu).
bool can_sample(int64_t columns, int64_t k) {
  const double due = static_cast<double>(k) / kTopKSampling;
  const double passing = kTopKSampling * (due + 8 * std::sqrt(due) + 8);
  return columns >= kTopKSampledShare * k && passing <= 0.6 * kTopKListed;
}

Status prepare(const TopKCall& call, int multiprocessors, TopKArgs* args, TopKPlan* plan,
               const Kernel** kernel) {
  TIERCEL_RETURN_IF_ERROR(check(call));
  *plan = {"none", 0, 0, 0, 0};
  const TensorView& logits = *call.logits;
  const int64_t rows = logits.shape[0], columns = logits.shape[1], k = call.out->shape[1];
  if (rows * k == 0) return Status();
  if (columns > 1 && logits.strides[1] != 1) {
    return Status::Unimplemented(mismatch({kOp, "logits", logits},
                                          "have contiguous rows for the precompiled kernels",
                                          "strides " + shape_text(logits.strides, 2)));
  }
  if (columns > kMost / 2 || k > kMost / 2 || rows > kMost / kTopKMostBlocks) {
    return Status::Unimplemented(std::string(kOp) + ": too large for one launch, got shape " +
                                 shape_text(logits.shape, 2) + " and k " + std::to_string(k));
  }
  const int64_t stride = rows > 1 ? logits.strides[0] : 0;
  args->logits = static_cast<const float*>(logits.data);
  args->out = static_cast<int32_t*>(call.out->data);
  args->row_stride = stride;
  if (call.lengths != nullptr) {
    args->lengths = static_cast<const int32_t*>(call.lengths->data);
    args->length_step = rows > 1 ? call.lengths->strides[0] : 0;
  }
  args->k = static_cast<uint32_t>(k);
  args->columns = static_cast<int>(columns);
  args->vectors = reinterpret_cast<uintptr_t>(logits.data) % 16 == 0 && stride % 4 == 0;
  int count = 0;
  // Blocks of a row cost the sampled kernel more than they gain.
  int blocks = blocks_of(rows, columns, 0, kTopKSampledPart, kTopKSampledPart);
  const int64_t part = part_of(columns, blocks);
  const bool sampled = args->vectors && rows * columns >= kManyElements &&
                       part >= kTopKLeastSampled && part <= kTopKSampledPart &&
                       can_sample(columns, k);
  unsigned shared = kTopKSampledShared;
  if (!sampled) {
    blocks = blocks_of(rows, columns, multiprocessors, kTopKKept, kTopKLeastPart);
    args->kept = static_cast<int>(std::min<int64_t>(part_of(columns, blocks), kTopKKept));
    shared = kTopKStateBytes + args->kept * 4;
  }
  *kernel = &(sampled ? top_k_sampled_kernels(&count) : top_k_kernels(&count))->kernel;
  *plan = {(*kernel)->name(), static_cast<unsigned>(rows * blocks), kTopKThreads,
           static_cast<unsigned>(blocks), shared};
  return Status();
}

}  // namespace

Status top_k_indices_plan(const TopKCall& call, int multiprocessors, TopKPlan* plan) {
  TopKArgs args{};
  const Kernel* kernel = nullptr;
  return prepare(call, multiprocessors, &args, plan, &kernel);
}

Status top_k_indices(const TopKCall& call, void* stream) {
  TopKArgs args{};
  TopKPlan plan;
  const Kernel* kernel = nullptr;
  int multiprocessors = 0;
  const int device = call.logits->device_index;
  if (call.logits->device_type == DeviceType::kCUDA) {
    TIERCEL_RETURN_IF_ERROR(multiprocessor_count(device, &multiprocessors));
  }
  TIERCEL_RETURN_IF_ERROR(prepare(call, multiprocessors, &args, &plan, &kernel));
  if (plan.grid == 0) return Status();
  LaunchConfig config;
  config.grid.x = plan.grid;
  config.block.x = plan.block;
  config.cluster.x = plan.cluster;
  config.dynamic_smem = plan.dynamic_smem;
  config.dependent = true;
  void* pointers[] = {&args};
  return kernel->launch(config, device, stream, pointers);
}

}  // namespace tiercel
