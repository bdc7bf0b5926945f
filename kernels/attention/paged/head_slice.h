// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_ATTENTION_PAGED_HEAD_SLICE_H_
#define KERNELS_ATTENTION_PAGED_HEAD_SLICE_H_

#include <algorithm>
#include <cstdint>

#include "kernels/attention/paged/paged.h"

namespace tiercel {

// A call's key heads from `first` on, `count` of them or the rest, with their query heads.
class HeadSlice {
 public:
  HeadSlice(const PagedAttentionCall& call, int64_t first, int64_t count) : call_(call) {
    const int64_t kv_heads = call.k_cache->shape[2], group = call.q->shape[1] / kv_heads;
    count = std::min(count, kv_heads - first);
    cut(call.q, 1, first * group, count * group, &q_, &call_.q);
    cut(call.out, 1, first * group, count * group, &out_, &call_.out);
    cut(call.k_cache, 2, first, count, &k_, &call_.k_cache);
    cut(call.v_cache, 2, first, count, &v_, &call_.v_cache);
    cut(call.sinks, 0, first * group, count * group, &sinks_, &call_.sinks);
    cut(call.lse, 0, first * group, count * group, &lse_, &call_.lse);
    cut_scale(call.k_scale, kv_heads, first, count, &k_scale_, &call_.k_scale);
    cut_scale(call.v_scale, kv_heads, first, count, &v_scale_, &call_.v_scale);
  }
  HeadSlice(const HeadSlice&) = delete;
  HeadSlice& operator=(const HeadSlice&) = delete;

  const PagedAttentionCall& call() const { return call_; }

 private:
  struct Own {
    TensorView view;
    int64_t shape[4], strides[4];
  };

  static void cut(const TensorView* from, int dimension, int64_t first, int64_t count, Own* own,
                  const TensorView** to) {
    if (from == nullptr) return;
    own->view = *from;
    std::copy(from->shape, from->shape + from->ndim, own->shape);
    own->shape[dimension] = count;
    own->view.shape = own->shape;
    own->view.data = static_cast<char*>(from->data) +
                     first * from->strides[dimension] * dtype_bytes(from->dtype);
    *to = &own->view;
  }

  // A scale has one element, or one of each head in any shape without gaps.
  static void cut_scale(const TensorView* from, int64_t heads, int64_t first, int64_t count,
                        Own* own, const TensorView** to) {
    if (from == nullptr) return;
    int64_t elements = 1;
    for (int i = 0; i < from->ndim; ++i) elements *= from->shape[i];
    if (elements != heads) return;
    own->view = *from;
    own->view.ndim = 1;
    own->view.shape = own->shape;
    own->view.strides = own->strides;
    own->view.data = static_cast<char*>(from->data) + first * dtype_bytes(from->dtype);
    own->shape[0] = count;
    own->strides[0] = 1;
    *to = &own->view;
  }

  PagedAttentionCall call_;
  Own q_, out_, k_, v_, sinks_, lse_, k_scale_, v_scale_;
};

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_HEAD_SLICE_H_
