// SPDX-License-Identifier: Apache-2.0
// New keys and values into a paged cache.
#ifndef KERNELS_ROTARY_KV_CACHE_WRITE_H_
#define KERNELS_ROTARY_KV_CACHE_WRITE_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct KvCacheCall {
  const TensorView* key = nullptr;    // [T, H, D] bfloat16 or float16, last dimension contiguous
  const TensorView* value = nullptr;  // the same
  const TensorView* key_cache =
      nullptr;  // [blocks, block size, H, D] of key's dtype or float8_e4m3fn
  const TensorView* value_cache = nullptr;  // the same
  const TensorView* slots = nullptr;        // [T] int32 or int64: block * block size + place
  const TensorView* key_scale = nullptr;    // float32, 1 or H elements, or null: 1
  const TensorView* value_scale = nullptr;
};

struct KvCachePlan {
  const char* kernel;  // "none" for an empty batch
  int vector_bytes;
  unsigned grid;
  unsigned block;
};

// A float8 cache holds element / scale, rounded to nearest even and saturated at +-448 (NaN stays
// NaN); scales are for float8 only. Slots outside of the cache, -1 among them, are skipped; of
// tokens with the same slot any one may stay, or parts of several.

// All checks and the choice of kernel; needs no GPU and no driver.
Status kv_cache_plan(const KvCacheCall& call, KvCachePlan* plan);

// Checks and chooses likewise, then launches on `stream` (a CUstream) of the tensors' device.
Status kv_cache_write(const KvCacheCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_ROTARY_KV_CACHE_WRITE_H_
