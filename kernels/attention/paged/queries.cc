// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/paged/queries.h"

#include <string>

#include "kernels/attention/decode/decode.h"
#include "kernels/attention/paged/check.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/driver.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr const char* kOp = kPagedOp;
constexpr int64_t kVector = 8;     // columns that a thread converts
constexpr int64_t kAlignment = 8;  // bytes
// Stands for the copy of q in a plan, which reads and writes nothing.
float* const kNowhere = reinterpret_cast<float*>(uintptr_t{256});
constexpr int64_t kMostRows = int64_t{1} << 29;

// Floats of the copy of q, a multiple of 16 bytes.
int64_t copy_floats(const TensorView& q) {
  return ceil_div(q.shape[0] * q.shape[1] * q.shape[2] / 2, int64_t{4}) * 4;
}

const Kernel& queries_kernel() { return KernelTable(paged_queries_kernels).begin()->kernel; }

Status check_layout(const Argument& q) {
  const TensorView& view = q.view;
  const std::string strides = "strides " + shape_text(view.strides, view.ndim);
  if (view.shape[2] > 1 && view.strides[2] != 1) {
    return unsupported(q, "be contiguous in its last dimension", strides);
  }
  bool aligned = reinterpret_cast<uintptr_t>(view.data) % kAlignment == 0;
  for (int i = 0; i < 2; ++i) {
    aligned = aligned && (view.shape[i] == 1 || view.strides[i] % kAlignment == 0);
  }
  if (aligned) return Status();
  return unsupported(q, "start at a multiple of 8 bytes, with strides that are too", strides);
}

}  // namespace

Status check_paged_queries(const PagedAttentionCall& call) {
  const Argument q{kOp, "q", *call.q}, k{kOp, "k_cache", *call.k_cache};
  TIERCEL_RETURN_IF_ERROR(check_rank(q, 3));
  TIERCEL_RETURN_IF_ERROR(check_rank(k, 4));
  TIERCEL_RETURN_IF_ERROR(check_dtype(k, {DType::kFloat8E4M3}));
  TIERCEL_RETURN_IF_ERROR(check_dtype({kOp, "out", *call.out}, {DType::kBFloat16}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(q));
  if (call.q_scale != nullptr) {
    const Argument scale{kOp, "q_scale", *call.q_scale};
    TIERCEL_RETURN_IF_ERROR(check_decode_scale(scale, q, 1, true));
  }
  if (call.k_scale != nullptr) {
    const Argument scale{kOp, "k_scale", *call.k_scale};
    TIERCEL_RETURN_IF_ERROR(check_decode_scale(scale, q, k.view.shape[2], true));
  }
  if (q.view.shape[0] >= kMostRows) {
    return unsupported(q, "have fewer than 2^29 rows", "shape " + shape_text(q.view.shape, 3));
  }
  if (q.view.shape[2] % kVector != 0) {
    return unsupported(q, "have a head dimension that is a multiple of 8 up to 512",
                       std::to_string(q.view.shape[2]));
  }
  return check_layout(q);
}

int64_t WideQueries::floats(const PagedAttentionCall& call) {
  const int64_t factors = call.q_scale == nullptr ? 0 : call.k_cache->shape[2];
  return copy_floats(*call.q) + ceil_div(factors, int64_t{4}) * 4;
}

WideQueries::WideQueries(const PagedAttentionCall& call, float* memory)
    : call_(call), from_(*call.q) {
  const int64_t heads = from_.shape[1], d = from_.shape[2], kv_heads = call.k_cache->shape[2];
  q_strides_[0] = heads * d, q_strides_[1] = d, q_strides_[2] = 1;
  q_ = from_;
  q_.data = memory;
  q_.dtype = DType::kBFloat16;
  q_.strides = q_strides_;
  call_.q = &q_;
  args_.q = static_cast<const char*>(from_.data);
  args_.to = reinterpret_cast<char*>(memory);
  args_.row = from_.strides[0];
  args_.head = from_.strides[1];
  args_.heads = static_cast<int32_t>(heads);
  args_.kv_heads = static_cast<int32_t>(kv_heads);
  args_.vectors = static_cast<int32_t>(d / kVector);
  call_.q_scale = nullptr;
  if (call.q_scale == nullptr) return;
  if (call.k_scale != nullptr) {
    args_.k_scale = static_cast<const float*>(call.k_scale->data);
    for (int i = 0; i < call.k_scale->ndim; ++i) {
      args_.k_scale_step |= call.k_scale->shape[i] > 1;
    }
  }
  args_.q_scale = static_cast<const float*>(call.q_scale->data);
  args_.factors = memory + copy_floats(from_);
  factors_shape_[0] = kv_heads, factors_strides_[0] = 1;
  factors_ = *call.q_scale;
  factors_.data = args_.factors;
  factors_.ndim = 1;
  factors_.shape = factors_shape_;
  factors_.strides = factors_strides_;
  call_.k_scale = &factors_;
}

Status paged_queries_plan(const PagedAttentionCall& call, int multiprocessors,
                          PagedAttentionPlan* plan) {
  TIERCEL_RETURN_IF_ERROR(check_paged_queries(call));
  const WideQueries wide(call, kNowhere);
  TIERCEL_RETURN_IF_ERROR(paged_attention_plan(wide.call(), multiprocessors, plan));
  if (plan->block == 0) return Status();
  plan->convert = queries_kernel().name();
  plan->workspace += WideQueries::floats(call);
  return Status();
}

Status PagedQueriesLaunch::prepare(const PagedAttentionCall& call) {
  if (!is_float8(*call.q)) {
    TIERCEL_RETURN_IF_ERROR(launch_.prepare(call));
    workspace_ = launch_.workspace();
    return Status();
  }
  TIERCEL_RETURN_IF_ERROR(check_paged_queries(call));
  int multiprocessors = 0;
  TIERCEL_RETURN_IF_ERROR(multiprocessor_count(call.q->device_index, &multiprocessors));
  PagedAttentionPlan plan;
  TIERCEL_RETURN_IF_ERROR(paged_attention_plan(call, multiprocessors, &plan));
  workspace_ = plan.workspace;
  if (plan.block > 0) narrow_ = &call;
  return Status();
}

Status PagedQueriesLaunch::run(float* workspace, void* stream) {
  if (narrow_ == nullptr) return launch_.run(workspace, stream);
  const WideQueries wide(*narrow_, workspace);
  TIERCEL_RETURN_IF_ERROR(launch_.prepare(wide.call()));
  TIERCEL_RETURN_IF_ERROR(wide.run(stream));
  return launch_.run(workspace + WideQueries::floats(*narrow_), stream);
}

Status WideQueries::run(void* stream) const {
  LaunchConfig config;
  config.grid.x = static_cast<unsigned>(from_.shape[0]);
  config.block.x = kPagedQueriesThreads;
  config.dependent = true;
  PagedQueriesArgs args = args_;
  void* pointers[] = {&args};
  return queries_kernel().launch(config, from_.device_index, stream, pointers);
}

}  // namespace tiercel
