// SPDX-License-Identifier: Apache-2.0
#include "kernels/mla/mla_sparse.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/mla/mla_host.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "mla_sparse_attention";
constexpr int64_t kMostSteps = int64_t{1} << 30;  // of all queries
constexpr int64_t kMostHeads = 65535;
constexpr int kPair = 2 * kMlaStep;

// Checks that arguments fit together.
Status check(const MlaSparseCall& call) {
  const Argument q{kOp, "q", *call.q}, cache{kOp, "kv_cache", *call.kv_cache};
  const Argument indices{kOp, "indices", *call.indices}, out{kOp, "out", *call.out};
  TIERCEL_RETURN_IF_ERROR(check_rank(q, 3));
  TIERCEL_RETURN_IF_ERROR(check_dtype(q, {DType::kBFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_rank(cache, 3));
  if (cache.view.dtype != q.view.dtype) {
    TIERCEL_RETURN_IF_ERROR(check_dtype(cache, {q.view.dtype, DType::kFloat8E4M3, DType::kUInt8}));
  }
  const int64_t* shape = q.view.shape;
  const int64_t width = cache.view.dtype == DType::kUInt8 ? kMlaPacked : shape[2];
  TIERCEL_RETURN_IF_ERROR(check_shape(cache, {cache.view.shape[0], cache.view.shape[1], width},
                                      "[pages, page size, D]"));
  TIERCEL_RETURN_IF_ERROR(check_rank(indices, 2));
  TIERCEL_RETURN_IF_ERROR(check_shape(indices, {shape[0], indices.view.shape[1]}, "[T, k]"));
  TIERCEL_RETURN_IF_ERROR(check_dtype(indices, {DType::kInt32}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(out, {q.view.dtype}));
  TIERCEL_RETURN_IF_ERROR(check_shape(out, {shape[0], shape[1], call.d_v}, "[T, H, d_v]"));
  TIERCEL_RETURN_IF_ERROR(check_cuda(q));
  for (const Argument* argument : {&cache, &indices, &out}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(*argument, q));
    TIERCEL_RETURN_IF_ERROR(check_cuda(*argument));
  }
  TIERCEL_RETURN_IF_ERROR(check_kv_scale(q, cache, call.kv_scale));
  if (call.lse == nullptr) return Status();
  const Argument lse{kOp, "lse", *call.lse};
  TIERCEL_RETURN_IF_ERROR(check_dtype(lse, {DType::kFloat32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(lse, {shape[0], shape[1]}, "[T, H]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(lse, q));
  TIERCEL_RETURN_IF_ERROR(check_cuda(lse));
  return check_contiguous(lse);
}

const Kernel& sparse_kernel(const MlaSparseCall& call) {
  const MlaLayout layout = layout_of(*call.kv_cache);
  return KernelTable(mla_sparse_kernels)
      .find([&](const auto& kernel) { return kernel.layout == layout; })
      ->kernel;
}

// Checks that there is a kernel for arguments that fit together and are not empty.
Status check_supported(const MlaSparseCall& call) {
  const Argument q{kOp, "q", *call.q}, cache{kOp, "kv_cache", *call.kv_cache};
  const Argument indices{kOp, "indices", *call.indices};
  const int64_t* shape = q.view.shape;
  if (shape[2] != kMlaKey) {
    return unsupported(q, "have 576 columns", std::to_string(shape[2]));
  }
  if (call.d_v != kMlaLatent) {
    return Status::Unimplemented(std::string(kOp) +
                                 ": `d_v` must be 512 for the precompiled kernels, got " +
                                 std::to_string(call.d_v));
  }
  if (!(call.scale > 0.0) || !std::isfinite(call.scale)) {
    return Status::Unimplemented(std::string(kOp) +
                                 ": `scale` must be positive for the precompiled kernels, got " +
                                 std::to_string(call.scale));
  }
  const int64_t places = cache.view.shape[1];
  if (places < 1 || places > kMost || (places & (places - 1)) != 0) {
    return unsupported(cache, "have a page size that is a power of two", std::to_string(places));
  }
  if (shape[1] > kMostHeads) {
    return unsupported(q, "have at most 65535 heads", std::to_string(shape[1]));
  }
  const int64_t entries = indices.view.shape[1];
  if (entries > kMost / 2 || shape[0] > kMostSteps / (2 * ceil_div(entries + 1, kPair))) {
    return unsupported(indices, "have fewer than 2^36 elements",
                       "shape " + shape_text(indices.view.shape, 2));
  }
  TIERCEL_RETURN_IF_ERROR(check_steps(indices));
  TIERCEL_RETURN_IF_ERROR(check_layout(q, 16));
  TIERCEL_RETURN_IF_ERROR(check_layout({kOp, "out", *call.out}, 8));
  return check_layout(cache, 16);
}

void set_args(const MlaSparseCall& call, MlaDecodeArgs* args) {
  const TensorView &q = *call.q, &cache = *call.kv_cache, &out = *call.out;
  const int64_t bytes = dtype_bytes(q.dtype);
  args->q = static_cast<const char*>(q.data);
  args->out = static_cast<char*>(out.data);
  args->lse = call.lse == nullptr ? nullptr : static_cast<float*>(call.lse->data);
  args->page_table = static_cast<const int32_t*>(call.indices->data);
  args->table_stride = call.indices->strides[0] * 4;
  args->table_step = step_of(*call.indices);
  for (int i = 0; i < 2; ++i) {
    args->q_strides[2 * i] = q.strides[i] * bytes;
    args->out_strides[2 * i] = out.strides[i] * bytes;
  }
  args->last_page = static_cast<int>(std::min(cache.shape[0] - 1, kMost));
  args->cache = static_cast<const char*>(cache.data);
  args->kv_scale =
      call.kv_scale == nullptr ? nullptr : static_cast<const float*>(call.kv_scale->data);
  args->page_stride = cache.strides[0] * dtype_bytes(cache.dtype);
  args->place_stride = cache.strides[1] * dtype_bytes(cache.dtype);
  args->batch = static_cast<int>(q.shape[0]);
  args->queries = 1;
  args->heads = args->rows = static_cast<int>(q.shape[1]);
  args->row_blocks = static_cast<int>(ceil_div(args->rows, kMlaRows));
  args->part_rows = std::min(args->rows, kMlaRows);
  args->capacity = static_cast<int>(call.indices->shape[1]);
  while ((int64_t{1} << args->page_bits) < cache.shape[1]) ++args->page_bits;
  args->copy_rows = 1;
  args->scale = static_cast<float>(call.scale * kLog2E);
}

Status prepare(const MlaSparseCall& call, int multiprocessors, MlaDecodeArgs* args,
               MlaDecodePlan* plan) {
  TIERCEL_RETURN_IF_ERROR(check(call));
  *plan = {"none", "none", 0, 0, 0, 0, 0, 0, 0, 0};
  if (call.q->shape[0] * call.q->shape[1] == 0) return Status();
  TIERCEL_RETURN_IF_ERROR(check_supported(call));
  set_args(call, args);
  // Each lane has a pair of steps at least; all of a query's in the batch-invariant mode.
  const int64_t pairs = std::max<int64_t>(ceil_div(args->capacity, kPair), 1);
  const bool split = pairs > 1 && !batch_invariant();
  args->lanes =
      batch_invariant() ? args->batch : lanes_of(*args, multiprocessors, args->batch * pairs);
  plan_shares(split, sparse_kernel(call), call.q->dtype, kSparseShared, args, plan);
  return Status();
}

}  // namespace

Status mla_sparse_attention_plan(const MlaSparseCall& call, int multiprocessors,
                                 MlaDecodePlan* plan) {
  MlaDecodeArgs args{};
  return prepare(call, multiprocessors, &args, plan);
}

Status MlaSparseLaunch::prepare(const MlaSparseCall& call) {
  dtype_ = call.q->dtype;
  device_ = call.q->device_index;
  int multiprocessors = 0;
  if (call.q->device_type == DeviceType::kCUDA) {
    TIERCEL_RETURN_IF_ERROR(multiprocessor_count(device_, &multiprocessors));
  }
  TIERCEL_RETURN_IF_ERROR(tiercel::prepare(call, multiprocessors, &args_, &plan_));
  if (plan_.grid > 0) kernel_ = &sparse_kernel(call);
  return Status();
}

Status MlaSparseLaunch::run(float* workspace, void* stream) {
  if (plan_.grid == 0) return Status();
  void* pointers[] = {&args_};
  return launch_and_combine(*kernel_, dtype_, plan_, &args_, pointers, device_, workspace, stream);
}

Status mla_sparse_attention(const MlaSparseCall& call, void* stream, int64_t* needed) {
  return run_with_workspace<MlaSparseLaunch>(kOp, call, stream, needed);
}

}  // namespace tiercel
