// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_ATTENTION_PAGED_AS_DECODE_H_
#define KERNELS_ATTENTION_PAGED_AS_DECODE_H_

#include <algorithm>
#include <cstdint>

#include "kernels/attention/decode/decode.h"
#include "kernels/attention/paged/paged.h"
#include "kernels/sm90/invariant.h"

namespace tiercel {

// A call whose sequences have few new tokens each, as decode_attention's kernels take it: they read
// keys once for 8 to 32 rows, so more rows than a few of those are the other kernels'.
class AsDecode {
 public:
  // `skips_longer`: sequences with more than `max_q` queries are left to another kernel.
  explicit AsDecode(const PagedAttentionCall& call, bool skips_longer = false)
      : q_(*call.q), out_(*call.out), total_(call.q->shape[0]), d_(call.q->shape[2]) {
    const int64_t batch = call.cu_seqlens_q->shape[0] - 1, heads = q_.shape[1];
    const int64_t kv_heads = std::max<int64_t>(call.k_cache->shape[2], 1);
    // A tree may be of one token.
    int64_t most = std::max<int64_t>(call.max_q, call.tree != nullptr);
    alone_ = is_alone(call);
    // No sequence has more queries than all of them.
    if (alone_ && call.tree == nullptr) most = std::min(most, std::max<int64_t>(total_, 1));
    rows_ = most > kMostRows ? kMostRows + 1 : most * (heads / kv_heads);
    float8_ = call.k_cache->dtype == DType::kFloat8E4M3;
    tree_ = call.tree != nullptr;
    near_ = near(*call.cu_seqlens_q) && (!tree_ || near(*call.tree));
    one_dimension_ = call.one_head_dimension();
    set(batch, most, &q_, q_shape_, q_strides_);
    set(batch, most, &out_, out_shape_, out_strides_);
    DecodeTensors& t = decode_.tensors;
    t = {&q_, call.k_cache, call.v_cache, call.page_table, call.seqused_k, &out_};
    t.prefix = call.prefix;
    t.k_scale = call.k_scale;
    t.v_scale = call.v_scale;
    t.sinks = call.sinks;
    if (call.lse != nullptr) {
      lse_ = *call.lse;
      lse_.ndim = 3;
      lse_.shape = lse_shape_;
      lse_.strides = lse_strides_;
      lse_shape_[0] = batch, lse_shape_[1] = heads, lse_shape_[2] = most;
      lse_strides_[0] = heads * most, lse_strides_[1] = most, lse_strides_[2] = 1;
      t.lse = &lse_;
    }
    decode_.options = {call.options.left, call.options.right, call.options.scale,
                       call.options.softcap, call.max_keys};
    decode_.rows = {call.cu_seqlens_q, total_, call.tree, skips_longer};
  }
  AsDecode(const AsDecode&) = delete;
  AsDecode& operator=(const AsDecode&) = delete;

  bool fits() const {
    const int64_t most = float8_ ? kMostRows : d_ > 128 ? 16 : 32;
    const bool aligned = q_strides_[1] % 8 == 0 && out_strides_[1] % 8 == 0;
    return one_dimension_ && rows_ >= 1 && (alone_ || rows_ <= most) && total_ < kMostTotal &&
           near_ && (total_ == 1 || aligned);
  }
  const DecodeCall& call() const { return decode_; }

  // True for calls that no other kernel takes: some trees, and float8 caches in the batch-invariant
  // mode, where chunks of any size have the bits of decoding.
  static bool is_alone(const PagedAttentionCall& call) {
    if (call.tree != nullptr) return !may_be_tiles(call);
    return batch_invariant() && call.k_cache->dtype == DType::kFloat8E4M3 &&
           call.q->shape[2] % 16 == 0 && call.q->shape[2] <= 256;
  }

  // True if there is a kernel with tiles of more rows that takes the tree of a call: tree.py. It is
  // for bfloat16 and 128 columns, without window and cap, and not for the batch-invariant mode.
  static bool may_be_tiles(const PagedAttentionCall& call) {
    const int64_t d = call.widest();
    return !batch_invariant() && call.k_cache->dtype == DType::kBFloat16 && d > 64 && d <= 128 &&
           call.options.left < 0 && call.options.softcap == 0.0;
  }

 private:
  static constexpr int64_t kMostRows = 64;  // of a key head: the largest of `most`
  static constexpr int64_t kMostTotal = int64_t{1} << 29;

  // Steps of integers fit 32 bits.
  static bool near(const TensorView& view) {
    return view.shape[0] < 2 || view.strides[0] <= 0x7fffffff / dtype_bytes(view.dtype);
  }

  // [Tq, H, D] as [B, Sq, H, D], of whose first stride the kernels make no use.
  static void set(int64_t batch, int64_t queries, TensorView* view, int64_t (&shape)[4],
                  int64_t (&strides)[4]) {
    shape[0] = batch, shape[1] = queries;
    strides[0] = 0, strides[1] = view->strides[0];
    for (int i = 1; i < 3; ++i) shape[i + 1] = view->shape[i], strides[i + 1] = view->strides[i];
    view->ndim = 4;
    view->shape = shape;
    view->strides = strides;
  }

  DecodeCall decode_;
  TensorView q_, out_, lse_;
  int64_t q_shape_[4], q_strides_[4], out_shape_[4], out_strides_[4];
  int64_t lse_shape_[3], lse_strides_[3];
  int64_t total_, d_, rows_;
  bool float8_, tree_, near_, one_dimension_;
  bool alone_;  // no other kernel takes the call: any number of rows
};

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_AS_DECODE_H_
