// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_ATTENTION_PAGED_CACHE_H_
#define KERNELS_ATTENTION_PAGED_CACHE_H_

#include <algorithm>
#include <cstdint>

#include "kernels/sm90/checks.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// A cache as rows of its heads, one page after the other.
struct PagedCache {
  PagedCache(const char* op, const char* name, const TensorView& from)
      : argument{op, name, from}, rows(from) {
    // The stride of a single place, page or head is arbitrary.
    const bool single = from.shape[1] == 1;
    const int64_t step = single ? from.strides[0] : from.strides[1];
    page_rows =
        single || from.shape[0] == 1 ? from.shape[1] : from.strides[0] / std::max<int64_t>(step, 1);
    whole = single || from.shape[0] == 1 || (step > 0 && from.strides[0] % step == 0);
    shape[0] = (from.shape[0] - 1) * page_rows + from.shape[1];
    shape[1] = from.shape[2];
    shape[2] = from.shape[3];
    strides[0] =
        shape[0] == 1 ? std::max<int64_t>(from.shape[2] * from.shape[3], int64_t{8}) : step;
    strides[1] = from.shape[2] == 1 ? from.shape[3] : from.strides[2];
    strides[2] = from.strides[3];
    rows.ndim = 3;
    rows.shape = shape;
    rows.strides = strides;
  }
  PagedCache(const PagedCache&) = delete;
  PagedCache& operator=(const PagedCache&) = delete;

  Argument argument;
  bool whole;  // pages are whole rows apart
  int64_t page_rows;
  int64_t shape[3];
  int64_t strides[3];
  TensorView rows;
};

// The stride of an int32 tensor's last dimension, in bytes.
inline int32_t step_of(const TensorView& view) {
  const int last = view.ndim - 1;
  return view.shape[last] > 1 ? static_cast<int32_t>(view.strides[last] * dtype_bytes(view.dtype))
                              : 0;
}

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_CACHE_H_
