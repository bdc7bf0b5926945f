// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/paged/check.h"

#include "kernels/attention/common/problem.h"

namespace tiercel {
namespace {

constexpr const char* kOp = kPagedOp;
constexpr int64_t kMostOfATree = 64;  // new tokens of a sequence: bits of a word
constexpr int64_t kLeastPage = 4;     // keys of a copy by the engine: a lane has one of 128 keys

Status check_integers(const Argument& argument, const Argument& q) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(argument, {DType::kInt32}));
  TIERCEL_RETURN_IF_ERROR(check_same_device(argument, q));
  return check_cuda(argument);
}

Status check_dtypes(const Argument& q, const Argument& k, const Argument& v, const Argument& out) {
  TIERCEL_RETURN_IF_ERROR(check_dtype(q, {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3}));
  if (!is_float8(k.view)) TIERCEL_RETURN_IF_ERROR(check_dtype(k, {q.view.dtype}));
  TIERCEL_RETURN_IF_ERROR(check_dtype(v, {k.view.dtype}));
  return check_dtype(out, {q.view.dtype});
}

Status check_tree(const PagedAttentionCall& call, const Argument& q) {
  const Argument tree{kOp, "tree_mask", *call.tree};
  TIERCEL_RETURN_IF_ERROR(check_dtype(tree, {DType::kInt64}));
  TIERCEL_RETURN_IF_ERROR(check_shape(tree, {q.view.shape[0]}, "[Tq]"));
  TIERCEL_RETURN_IF_ERROR(check_same_device(tree, q));
  TIERCEL_RETURN_IF_ERROR(check_cuda(tree));
  if (call.options.right != 0) {
    return Status::InvalidArgument(mismatch(tree, "be None unless `causal`", "a tensor"));
  }
  if (call.max_q > kMostOfATree) {
    return Status::InvalidArgument(std::string(kOp) +
                                   ": `max_seqlen_q` must be at most 64 with `tree_mask`, got " +
                                   std::to_string(call.max_q));
  }
  return Status();
}

}  // namespace

Status check_paged(const PagedAttentionCall& call) {
  const Argument q{kOp, "q", *call.q}, out{kOp, "out", *call.out};
  const Argument k{kOp, "k_cache", *call.k_cache}, v{kOp, "v_cache", *call.v_cache};
  const Argument table{kOp, "page_table", *call.page_table};
  const Argument lengths{kOp, "seqused_k", *call.seqused_k};
  const Argument starts{kOp, "cu_seqlens_q", *call.cu_seqlens_q};
  TIERCEL_RETURN_IF_ERROR(check_rank(q, 3));
  TIERCEL_RETURN_IF_ERROR(check_dtypes(q, k, v, out));
  TIERCEL_RETURN_IF_ERROR(check_rank(k, 4));
  const int64_t total = q.view.shape[0], heads = q.view.shape[1], d = q.view.shape[2];
  const int64_t pages = k.view.shape[0], places = k.view.shape[1], kv_heads = k.view.shape[2];
  const int64_t dv = v.view.ndim == 4 ? v.view.shape[3] : d;
  TIERCEL_RETURN_IF_ERROR(
      check_shape(k, {pages, places, kv_heads, d}, "[pages, page size, Hk, D]"));
  TIERCEL_RETURN_IF_ERROR(
      check_shape(v, {pages, places, kv_heads, dv}, "[pages, page size, Hk, Dv]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(out, {total, heads, dv}, "[Tq, H, Dv]"));
  TIERCEL_RETURN_IF_ERROR(check_rank(starts, 1));
  const int64_t batch = starts.view.shape[0] - 1;
  if (batch < 0) {
    return Status::InvalidArgument(mismatch(starts, "have at least one element", "none"));
  }
  TIERCEL_RETURN_IF_ERROR(check_rank(table, 2));
  TIERCEL_RETURN_IF_ERROR(
      check_shape(table, {batch, table.view.shape[1]}, "[B, pages of a sequence]"));
  TIERCEL_RETURN_IF_ERROR(check_shape(lengths, {batch}, "[B]"));
  for (const Argument* argument : {&table, &lengths, &starts}) {
    TIERCEL_RETURN_IF_ERROR(check_integers(*argument, q));
  }
  if (heads > 0 && (kv_heads < 1 || heads % kv_heads != 0)) {
    return Status::InvalidArgument(
        mismatch(k, "have a number of heads that divides that of `q`, " + std::to_string(heads),
                 std::to_string(kv_heads)));
  }
  TIERCEL_RETURN_IF_ERROR(check_cuda(q));
  for (const Argument* argument : {&k, &v, &out}) {
    TIERCEL_RETURN_IF_ERROR(check_same_device(*argument, q));
    TIERCEL_RETURN_IF_ERROR(check_cuda(*argument));
  }
  if (call.sinks != nullptr) {
    TIERCEL_RETURN_IF_ERROR(check_attention_sinks(kOp, "sinks", *call.sinks, heads, q.view));
  }
  if (call.tree != nullptr) TIERCEL_RETURN_IF_ERROR(check_tree(call, q));
  if (call.prefix != nullptr) {
    const Argument prefix{kOp, "prefix", *call.prefix};
    TIERCEL_RETURN_IF_ERROR(check_shape(prefix, {batch}, "[B]"));
    TIERCEL_RETURN_IF_ERROR(check_integers(prefix, q));
    if (call.tree != nullptr) {
      return Status::InvalidArgument(mismatch(prefix, "be None with `tree_mask`", "a tensor"));
    }
  }
  if (call.q_scale != nullptr) {
    return Status::InvalidArgument(
        mismatch({kOp, "q_scale", *call.q_scale}, "be None unless `q` is float8", "a tensor"));
  }
  for (const TensorView* scale : {call.k_scale, call.v_scale}) {
    if (scale == nullptr) continue;
    const Argument argument{kOp, scale == call.k_scale ? "k_scale" : "v_scale", *scale};
    TIERCEL_RETURN_IF_ERROR(check_decode_scale(argument, q, kv_heads, is_float8(k.view)));
  }
  if (call.lse == nullptr) return Status();
  return check_attention_lse(kOp, *call.lse, *call.q, {heads, total}, "[H, Tq]");
}

Status check_paged_values(const PagedAttentionCall& call) {
  const Argument v{kOp, "v_cache", *call.v_cache}, k{kOp, "k_cache", *call.k_cache};
  const int64_t dv = call.out->shape[2], places = call.k_cache->shape[1];
  if (call.one_head_dimension()) return Status();
  if (is_float8(*call.v_cache) || call.widest() > kMostOfTiles) {
    return unsupported(v, "have the head dimension of `q` if it is float8, or if one is over 256",
                       std::to_string(dv));
  }
  if (dv < 8 || dv % 8 != 0) {
    return unsupported(v, "have a head dimension that is a multiple of 8 up to 256",
                       std::to_string(dv));
  }
  if (places < kLeastPage) {
    return unsupported(k, "have pages of 4 keys or more if `v_cache` has another head dimension",
                       std::to_string(places));
  }
  return Status();
}

}  // namespace tiercel
