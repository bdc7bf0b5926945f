// SPDX-License-Identifier: Apache-2.0
// The second kernel of a call whose tiles' keys are split among blocks.
#ifndef KERNELS_ATTENTION_PAGED_COMBINE_H_
#define KERNELS_ATTENTION_PAGED_COMBINE_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kPagedCombineThreads = 128;

// In place of a number of keys: parts that grow, as kernel.py has them.
inline constexpr int kPagedGrowing = -1;

// Returns the number of growing parts of `keys` keys: 512 up to key 4096, 1024 up to 8192, then
// 2048.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline int paged_growing_parts(int keys) {
  int parts = 0, first = 0;
  for (int size = 512; size <= 2048; size *= 2) {
    const int end = size == 512 ? 4096 : 8192;
    int within = keys - first > 0 ? keys - first : 0;
    if (size < 2048 && within > end - first) within = end - first;
    parts += (within + size - 1) / size;
    first = end;
  }
  return parts;
}

struct PagedCombineArgs {
  const char* partial;       // [total, parts, heads, 8 * row_vectors], 16 bits
  const float* partial_lse;  // [parts, heads, total]
  const char* starts;        // of sequences, batch + 1 of them, of any contents
  const char* lengths;       // of sequences, if `part_keys`
  const float* sinks;        // [heads] or null
  char* out;
  float* lse;              // [heads, total] or null
  int64_t out_strides[2];  // bytes: row, head
  int64_t vectors;         // of the result, 16 bytes each
  int32_t row_vectors;     // of a row of a head
  int32_t total, heads, parts, batch;
  int32_t step;         // from one of the starts to the next, in bytes
  int32_t length_step;  // the same of lengths
  int32_t capacity;     // keys of a sequence, at most
  int32_t part_keys;    // of a part, or kPagedGrowing; 0: parts are even shares
};

struct PagedCombineKernel {
  DType dtype;
  bool fixed;  // for parts of a fixed number of keys
  Kernel kernel;
};

const PagedCombineKernel* paged_combine_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_COMBINE_H_
