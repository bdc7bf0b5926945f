// SPDX-License-Identifier: Apache-2.0
// 16-bit copies of a float8 cache's keys and values, for tiles that read them many times.
#ifndef KERNELS_ATTENTION_PAGED_WIDEN_H_
#define KERNELS_ATTENTION_PAGED_WIDEN_H_

#include <vector_types.h>

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kPagedWidenPlaces = 128;  // of a page of the copies
inline constexpr int kPagedWidenElements = 8;  // of a load
inline constexpr int kPagedWidenRows = 32;     // that a block has at once
inline constexpr int kPagedWidenLanes = 16;    // of a row, at most: a lane loads from both halves

// A block has the keys or the values of a page and a head: blockIdx.x is the head of one or the
// other, blockIdx.y the page, threadIdx.x the load of half a row, threadIdx.y the row.

// The copies of a call's keys and values, behind each other.
struct PagedWidenSizes {
  int64_t pages = 0;
  int64_t capacity = 0;  // keys of a sequence, at most
  int64_t kv_heads = 0, d = 0;
  DType dtype = DType::kBFloat16;
  int device = 0;

  int64_t cache_floats() const { return pages * kPagedWidenPlaces * kv_heads * d / 2; }
  int64_t floats() const { return 2 * cache_floats(); }
};

struct PagedWidenArgs {
  // Keys and values have one each. A page of the copies has heads before places.
  struct Cache {
    const char* from;
    int64_t head;  // from one to the next, in bytes
    char* to;
    int32_t row;  // from one to the next, in bytes
  };
  Cache caches[2];
  const char* table;    // of the float8 cache
  const char* lengths;  // of sequences
  // For each page that is copied: its sequence or -1, its index in the sequence, and in the copies.
  const int4* sources;
  int64_t table_row;   // from a sequence's pages to the next one's, in bytes
  int32_t table_step;  // from a page to the next, in bytes
  int32_t length_step;
  int32_t capacity;  // keys of a sequence, at most; not 0
  int32_t kv_heads;
  int32_t columns;    // of a row
  int32_t page_bits;  // log2 of the keys of a page of the cache
  int32_t page_rows;  // from a page to the next
  int32_t last_page;
};

struct PagedWidenKernel {
  DType dtype;  // of the copies
  Kernel kernel;
};

const PagedWidenKernel* paged_widen_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_WIDEN_H_
