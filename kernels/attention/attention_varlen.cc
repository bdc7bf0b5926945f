// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <string>

#include "kernels/attention/attention.h"
#include "kernels/attention/attention_problem.h"
#include "kernels/sm90/checks.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "attention_varlen";

Status check_starts(const char* name, const TensorView& starts, int64_t batch,
                    const TensorView& q) {
  const Argument argument{kOp, name, starts};
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kInt32}));
  TIERCEL_RETURN_IF_ERROR(check_shape(argument, {batch + 1}, "[B + 1]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, Argument{kOp, "q", q}));
  TIERCEL_RETURN_IF_ERROR(check_cuda(argument));
  return check_contiguous(argument);
}

Status check(const PackedAttention& call, const AttentionOptions& options,
             AttentionProblem* problem) {
  const TensorView &q = *call.q, &k = *call.k, &v = *call.v, &out = *call.out;
  const Argument q_arg{kOp, "q", q};
  const Argument k_arg{kOp, "k", k};
  const Argument v_arg{kOp, "v", v};
  const Argument out_arg{kOp, "out", out};
  for (const Argument* argument : {&q_arg, &k_arg, &v_arg, &out_arg}) {
    TIERCEL_RETURN_IF_ERROR(check_rank(*argument, 3));
  }
  TIERCEL_RETURN_IF_ERROR(check_dtype(q_arg, {DType::kBFloat16, DType::kFloat16}));
  const int64_t total_q = q.shape[0], heads = q.shape[1], d = q.shape[2];
  const int64_t total_k = k.shape[0], kv_heads = k.shape[1];
  TIERCEL_RETURN_IF_ERROR(check_shape(k_arg, {total_k, kv_heads, d}, "[Tk, Hk, D]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(v_arg, {total_k, kv_heads, d}, "[Tk, Hk, D]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(out_arg, {total_q, heads, d}, "[Tq, H, D]"));
  TIERCEL_RETURN_IF_ERROR(check_attention_tensors(kOp, q, k, v, out, heads, kv_heads, q.dtype));
  const Argument starts_arg{kOp, "cu_seqlens_q", *call.starts_q};
  TIERCEL_RETURN_IF_ERROR(check_rank(starts_arg, 1));
  const int64_t batch = call.starts_q->shape[0] - 1;
  if (batch < 0) {
    return Status::InvalidArgument(mismatch(starts_arg, "have at least one element", "none"));
  }
  TIERCEL_RETURN_IF_ERROR(check_starts("cu_seqlens_q", *call.starts_q, batch, q));
  TIERCEL_RETURN_IF_ERROR(check_starts("cu_seqlens_k", *call.starts_k, batch, q));
  if (call.lse != nullptr) {
    TIERCEL_RETURN_IF_ERROR(check_attention_lse(kOp, *call.lse, q, {heads, total_q}, "[H, Tq]"));
  }
  if (call.max_q < 0 || call.max_k < 0) {
    return Status::InvalidArgument(
        std::string(kOp) + ": `max_seqlen_q` and `max_seqlen_k` must be at least 0, got " +
        std::to_string(call.max_q) + " and " + std::to_string(call.max_k));
  }
  const int64_t seq_q = total_q == 0 ? 0 : call.max_q;
  const int64_t seq_k = total_k == 0 ? 0 : call.max_k;
  TIERCEL_RETURN_IF_ERROR(
      attention_problem(kOp, q, batch, seq_q, seq_k, kv_heads, options, true, problem));
  if (problem->empty()) return Status();
  const TensorMapSpec any{
      3, {64, 1, 64}, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE};
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, q, kOp, "q"));
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, k, kOp, "k"));
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, v, kOp, "v"));
  return check_tensor_map(any, out, kOp, "out");
}

// [T, H, D] as [T + 1, 2^30 + 1, H, 2^30, D]: element (end, 2^30, h, 2^30 - n + i, c) is row i of a
// sequence of n rows that ends before row `end`. The first dimension and the fourth both go by
// rows, and 2^30 steps of the second are 2^64 bytes less 2^30 rows: addresses wrap, and the map
// begins where the tensor does. (The copy engine loads nothing through a map that begins in
// unmapped memory. The trick is of Triton's tools/ragged_tma.py.)
constexpr int64_t kPackedRows = int64_t{1} << 30;  // PACKED_ROWS in attention_layouts_cute.py
constexpr int64_t kWrap = int64_t{1} << 34;        // bytes; 2^30 times it is 2^64

struct Ends {
  explicit Ends(const TensorView& from)
      : shape{from.shape[0] + 1, kPackedRows + 1, from.shape[1], kPackedRows, from.shape[2]},
        strides{from.strides[0], kWrap / dtype_bytes(from.dtype) - from.strides[0], from.strides[1],
                from.strides[0], from.strides[2]},
        view(from) {
    view.ndim = 5;
    view.shape = shape;
    view.strides = strides;
  }
  Ends(const Ends&) = delete;
  Ends& operator=(const Ends&) = delete;

  int64_t shape[5];
  int64_t strides[5];
  TensorView view;
};

}  // namespace

Status attention_varlen_plan(const PackedAttention& call, const AttentionOptions& options,
                             int multiprocessors, AttentionPlan* plan) {
  AttentionProblem problem;
  TIERCEL_RETURN_IF_ERROR(check(call, options, &problem));
  *plan = attention_plan_of(call.q->dtype, problem, multiprocessors);
  return Status();
}

Status attention_varlen(const PackedAttention& call, const AttentionOptions& options,
                        void* stream) {
  AttentionProblem problem;
  TIERCEL_RETURN_IF_ERROR(check(call, options, &problem));
  if (problem.empty()) return Status();
  const Ends q(*call.q), k(*call.k), v(*call.v), out(*call.out);
  AttentionPointers pointers;
  pointers.lse = call.lse == nullptr ? nullptr : call.lse->data;
  pointers.starts_q = call.starts_q->data;
  pointers.starts_k = call.starts_k->data;
  pointers.total_q = call.q->shape[0];
  return attention_launch(kOp, problem, options, {q.view, k.view, v.view, out.view}, pointers,
                          stream);
}

}  // namespace tiercel
