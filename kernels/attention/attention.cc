// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/attention.h"

#include "kernels/attention/attention_problem.h"
#include "kernels/sm90/checks.h"

namespace tiercel {
namespace {

constexpr char kOp[] = "attention";

}  // namespace

Status check_attention(const char* op, const TensorView& q, const TensorView& k,
                       const TensorView& v, const TensorView& out, const TensorView* lse,
                       const AttentionOptions& options, AttentionProblem* problem,
                       AttentionElements elements) {
  const Argument q_arg{op, "q", q};
  const Argument k_arg{op, "k", k};
  const Argument v_arg{op, "v", v};
  const Argument out_arg{op, "out", out};
  for (const Argument* argument : {&q_arg, &k_arg, &v_arg, &out_arg}) {
    TIERCEL_RETURN_IF_ERROR(check_rank(*argument, 4));
  }
  const bool fp8 = elements == AttentionElements::kFp8;
  TIERCEL_RETURN_IF_ERROR(fp8 ? check_dtype(q_arg, {DType::kFloat8E4M3})
                              : check_dtype(q_arg, {DType::kBFloat16, DType::kFloat16}));
  const int64_t batch = q.shape[0], seq_q = q.shape[1], heads = q.shape[2], d = q.shape[3];
  const int64_t seq_k = k.shape[1], kv_heads = k.shape[2];
  TIERCEL_RETURN_IF_ERROR(check_shape(k_arg, {batch, seq_k, kv_heads, d}, "[B, Sk, Hk, D]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(v_arg, {batch, seq_k, kv_heads, d}, "[B, Sk, Hk, D]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(out_arg, {batch, seq_q, heads, d}, "[B, Sq, H, D]"));
  TIERCEL_RETURN_IF_ERROR(
      check_attention_tensors(op, q, k, v, out, heads, kv_heads, fp8 ? DType::kBFloat16 : q.dtype));
  if (lse != nullptr) {
    TIERCEL_RETURN_IF_ERROR(check_attention_lse(op, *lse, q, {batch, heads, seq_q}, "[B, H, Sq]"));
  }
  TIERCEL_RETURN_IF_ERROR(
      attention_problem(op, q, batch, seq_q, seq_k, kv_heads, options, false, problem));
  if (problem->empty()) return Status();
  const TensorMapSpec any{
      4, {1, 64, 1, 64}, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE};
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, q, op, "q"));
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, k, op, "k"));
  TIERCEL_RETURN_IF_ERROR(check_tensor_map(any, v, op, "v"));
  return check_tensor_map(any, out, op, "out");
}

Status attention_plan(const TensorView& q, const TensorView& k, const TensorView& v,
                      const TensorView& out, const TensorView* lse, const AttentionOptions& options,
                      int multiprocessors, AttentionPlan* plan) {
  AttentionProblem problem;
  TIERCEL_RETURN_IF_ERROR(check_attention(kOp, q, k, v, out, lse, options, &problem));
  *plan = attention_plan_of(q.dtype, problem, multiprocessors);
  return Status();
}

Status attention(const TensorView& q, const TensorView& k, const TensorView& v,
                 const TensorView& out, const TensorView* lse, const AttentionOptions& options,
                 void* stream) {
  AttentionProblem problem;
  TIERCEL_RETURN_IF_ERROR(check_attention(kOp, q, k, v, out, lse, options, &problem));
  if (problem.empty()) return Status();
  const AttentionByHead q_rows(q), k_rows(k), v_rows(v), out_rows(out);
  return attention_launch(kOp, problem, options,
                          {q_rows.view, k_rows.view, v_rows.view, out_rows.view},
                          lse == nullptr ? nullptr : lse->data, /*packed=*/nullptr, stream);
}

}  // namespace tiercel
