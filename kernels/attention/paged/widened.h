// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_ATTENTION_PAGED_WIDENED_H_
#define KERNELS_ATTENTION_PAGED_WIDENED_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels/attention/paged/cache.h"
#include "kernels/attention/paged/paged.h"
#include "kernels/attention/paged/widen.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {

// The 16-bit copies of a float8 cache as a paged cache of their own, from `memory` on.
class WidenedCache {
 public:
  WidenedCache(const PagedWidenSizes& sizes, float* memory) : device_(sizes.device) {
    const int64_t heads = sizes.kv_heads, d = sizes.d, head = kPagedWidenPlaces * d;
    for (int i = 0; i < 2; ++i) {
      set(sizes.dtype, {sizes.pages, kPagedWidenPlaces, heads, d}, {heads * head, d, head, 1},
          memory + i * sizes.cache_floats(), &caches_[i]);
    }
  }
  WidenedCache(const WidenedCache&) = delete;
  WidenedCache& operator=(const WidenedCache&) = delete;

  const TensorView& keys() const { return caches_[0].view; }
  const TensorView& values() const { return caches_[1].view; }

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
  View caches_[2];
};

// The most keys of a sequence, as far as the host knows.
inline int64_t most_keys(const PagedAttentionCall& call) {
  const int64_t capacity = call.page_table->shape[1] * call.k_cache->shape[1];
  return call.max_keys >= 0 ? std::min(capacity, call.max_keys) : capacity;
}

// The sizes of one sequence's copies.
inline PagedWidenSizes widen_sizes(const PagedAttentionCall& call) {
  PagedWidenSizes sizes;
  sizes.capacity = most_keys(call);
  sizes.pages = std::max<int64_t>(ceil_div(sizes.capacity, int64_t{kPagedWidenPlaces}), 1);
  sizes.kv_heads = call.k_cache->shape[2];
  sizes.d = call.q->shape[2];
  sizes.dtype = call.q->dtype;
  sizes.device = call.q->device_index;
  return sizes;
}

inline const PagedWidenKernel& widen_for(DType dtype) {
  return *KernelTable(paged_widen_kernels).find([&](const auto& kernel) {
    return kernel.dtype == dtype;
  });
}

// The arguments of a launch that copies the caches k and v, but for the copies' places.
inline void set_widen(const PagedAttentionCall& call, const PagedWidenSizes& sizes,
                      const PagedCache& k, const PagedCache& v, PagedWidenArgs* a) {
  const TensorView &table = *call.page_table, &lengths = *call.seqused_k;
  const PagedCache* caches[] = {&k, &v};
  for (int i = 0; i < 2; ++i) {
    const TensorView& rows = caches[i]->rows;
    a->caches[i] = {static_cast<const char*>(rows.data), rows.strides[1], nullptr,
                    static_cast<int32_t>(rows.strides[0])};
  }
  a->table = static_cast<const char*>(table.data);
  a->lengths = static_cast<const char*>(lengths.data);
  a->table_row = table.shape[0] > 1 ? table.strides[0] * 4 : 0;
  a->table_step = step_of(table);
  a->length_step = step_of(lengths);
  a->capacity = static_cast<int32_t>(std::max<int64_t>(sizes.capacity, 1));
  a->columns = static_cast<int32_t>(sizes.d);
  a->kv_heads = static_cast<int32_t>(sizes.kv_heads);
  while ((int64_t{1} << a->page_bits) < call.k_cache->shape[1]) ++a->page_bits;
  a->page_rows = static_cast<int32_t>(k.page_rows);
  a->last_page = static_cast<int32_t>(call.k_cache->shape[0] - 1);
}

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_WIDENED_H_
