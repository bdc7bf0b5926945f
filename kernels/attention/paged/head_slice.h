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
  }
  HeadSlice(const HeadSlice&) = delete;
  HeadSlice& operator=(const HeadSlice&) = delete;

  const PagedAttentionCall& call() const { return call_; }

 private:
  struct Own {
    TensorView view;
    int64_t shape[4];
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

  PagedAttentionCall call_;
  Own q_, out_, k_, v_, sinks_, lse_;
};

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_HEAD_SLICE_H_
