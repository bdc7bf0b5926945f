// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <string>

#include "kernels/attention/common/problem.h"
#include "kernels/sm90/checks.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "attention_varlen";

// The limit of rows in all sequences: row numbers plus a tile fit 32 bits.
constexpr int64_t kMaxRows = int64_t{1} << 29;
constexpr int64_t kMaxStep = 0x7fffffff;
constexpr int64_t kVector = 8;  // elements of out in 16 bytes

Status unsupported(const Argument& argument, const std::string& expected, const std::string& got) {
  return Status::Unimplemented(mismatch(argument, expected + " for the precompiled kernels", got));
}

Status check_starts(const char* op, const char* name, const TensorView& starts, int64_t batch,
                    const TensorView& q) {
  const Argument argument{op, name, starts};
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kInt32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {batch + 1}, "[B + 1]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, Argument{op, "q", q}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  if (batch == 0 || starts.strides[0] <= kMaxStep / 4) return Status();
  return unsupported(argument, "have elements that are less than 2 GiB apart",
                     "strides " + shape_text(starts.strides, 1));
}

}  // namespace

Status check_attention_packed(const char* op, const PackedAttention& call,
                              AttentionElements elements) {
  const TensorView &q = *call.q, &k = *call.k, &v = *call.v, &out = *call.out;
  const Argument q_arg{op, "q", q};
  const Argument k_arg{op, "k", k};
  const Argument v_arg{op, "v", v};
  const Argument out_arg{op, "out", out};
  for (const Argument* argument : {&q_arg, &k_arg, &v_arg, &out_arg}) {
    TIERCEL_RETURN_IF_ERROR(check_rank(*argument, 3));
  }
  const bool fp8 = elements == AttentionElements::kFp8;
  TIERCEL_RETURN_IF_ERROR(fp8 ? check_dtype(q_arg, {DType::kFloat8E4M3})
                              : check_dtype(q_arg, {DType::kBFloat16, DType::kFloat16}));
  const int64_t total_q = q.shape[0], heads = q.shape[1], d = q.shape[2];
  const int64_t total_k = k.shape[0], kv_heads = k.shape[1], d_v = v.shape[2];
  TIERCEL_RETURN_IF_ERROR(check_shape(k_arg, {total_k, kv_heads, d}, "[Tk, Hk, D]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(v_arg, {total_k, kv_heads, d_v}, "[Tk, Hk, Dv]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(out_arg, {total_q, heads, d_v}, "[Tq, H, Dv]"));
  TIERCEL_RETURN_IF_ERROR(
      check_attention_tensors(op, q, k, v, out, heads, kv_heads, fp8 ? DType::kBFloat16 : q.dtype));
  const Argument starts_arg{op, "cu_seqlens_q", *call.starts_q};
  TIERCEL_RETURN_IF_ERROR(check_rank(starts_arg, 1));
  const int64_t batch = call.starts_q->shape[0] - 1;
  if (batch < 0) {
    return Status::InvalidArgument(mismatch(starts_arg, "have at least one element", "none"));
  }
  TIERCEL_RETURN_IF_ERROR(check_starts(op, "cu_seqlens_q", *call.starts_q, batch, q));
  TIERCEL_RETURN_IF_ERROR(check_starts(op, "cu_seqlens_k", *call.starts_k, batch, q));
  if (call.lse != nullptr) {
    TIERCEL_RETURN_IF_ERROR(check_attention_lse(op, *call.lse, q, {heads, total_q}, "[H, Tq]"));
  }
  for (const Argument* argument : {&q_arg, &k_arg}) {
    if (argument->view.shape[0] >= kMaxRows) {
      return unsupported(*argument, "have fewer than 2^29 rows",
                         "shape " + shape_text(argument->view.shape, 3));
    }
  }
  return Status();
}

Status check_attention_packed_maps(const char* op, const PackedAttention& call) {
  const TensorMapSpec any{
      3, {64, 1, 64}, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE};
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, *call.q, op, "q"));
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, *call.k, op, "k"));
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, *call.v, op, "v"));
  return check_tensor_map(any, *call.out, op, "out");
}

Status check_attention_varlen(const PackedAttention& call, AttentionProblem* problem,
                              AttentionElements elements) {
  TIERCEL_RETURN_IF_ERROR(check_attention_packed(kOp, call, elements));
  const TensorView &q = *call.q, &k = *call.k, &out = *call.out;
  if (call.max_q < 0 || call.max_k < 0) {
    return Status::InvalidArgument(
        std::string(kOp) + ": `max_seqlen_q` and `max_seqlen_k` must be at least 0, got " +
        std::to_string(call.max_q) + " and " + std::to_string(call.max_k));
  }
  // No sequence is longer than all of them, whatever max_q and max_k are.
  const int64_t seq_q = std::min(call.max_q, q.shape[0]), seq_k = std::min(call.max_k, k.shape[0]);
  const int64_t batch = call.starts_q->shape[0] - 1;
  TIERCEL_RETURN_IF_ERROR(attention_problem(kOp, q, *call.v, batch, seq_q, seq_k, k.shape[1],
                                            call.options, true, problem));
  if (problem->empty()) return Status();
  TIERCEL_RETURN_IF_ERROR(check_attention_packed_maps(kOp, call));
  for (int i = 0; i < 2; ++i) {
    if (out.shape[i] > 1 && out.strides[i] / kVector > kMaxStep) {
      return unsupported(Argument{kOp, "out", out}, "have rows that are less than 32 GiB apart",
                         "strides " + shape_text(out.strides, 3));
    }
  }
  return Status();
}

AttentionPackedArgs::AttentionPackedArgs(const PackedAttention& call)
    : starts_q(call.starts_q->data),
      starts_k(call.starts_k->data),
      out(call.out->data),
      total_q(static_cast<int32_t>(call.q->shape[0])),
      total_k(static_cast<int32_t>(call.k->shape[0])),
      step_q(static_cast<int32_t>(call.starts_q->strides[0] * 4)),
      step_k(static_cast<int32_t>(call.starts_k->strides[0] * 4)),
      row_step(static_cast<int32_t>(call.out->strides[0] / kVector)),
      head_step(static_cast<int32_t>(call.out->strides[1] / kVector)),
      columns(static_cast<int32_t>(call.out->shape[2])) {}

}  // namespace tiercel
