// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_ATTENTION_PAGED_WIDENED_H_
#define KERNELS_ATTENTION_PAGED_WIDENED_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels/attention/paged/paged.h"
#include "kernels/attention/paged/widen.h"

namespace tiercel {

// The 16-bit copies of a float8 cache as a paged cache of their own, from `memory` on.
class WidenedCache {
 public:
  WidenedCache(const PagedWidenSizes& sizes, float* memory) : device_(sizes.device) {
    const int64_t heads = sizes.kv_heads, d = sizes.d, head = kPagedWidenPlaces * d;
    for (int i = 0; i < 2; ++i) {
      set(sizes.dtype, {sizes.pages(), kPagedWidenPlaces, heads, d}, {heads * head, d, head, 1},
          memory + i * sizes.cache_floats(), &caches_[i]);
    }
    set(DType::kInt32, {sizes.batch, sizes.columns}, {sizes.columns, 1},
        memory + 2 * sizes.cache_floats(), &table_);
  }
  WidenedCache(const WidenedCache&) = delete;
  WidenedCache& operator=(const WidenedCache&) = delete;

  const TensorView& keys() const { return caches_[0].view; }
  const TensorView& values() const { return caches_[1].view; }
  const TensorView& table() const { return table_.view; }

  // A call over the copies; what is in them has no other factors.
  PagedAttentionCall call(const PagedAttentionCall& over_float8) const {
    PagedAttentionCall call = over_float8;
    call.k_cache = &keys();
    call.v_cache = &values();
    call.page_table = &table();
    return call;
  }

 private:
  struct View {
    TensorView view;
    int64_t shape[4], strides[4];
  };

  void set(DType dtype, std::initializer_list<int64_t> shape,
           std::initializer_list<int64_t> strides, void* data, View* own) const {
    std::copy(shape.begin(), shape.end(), own->shape);
    std::copy(strides.begin(), strides.end(), own->strides);
    own->view = {
        data,       dtype,       DeviceType::kCUDA, device_, static_cast<int32_t>(shape.size()),
        own->shape, own->strides};
  }

  int device_;
  View caches_[2], table_;
};

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_WIDENED_H_
