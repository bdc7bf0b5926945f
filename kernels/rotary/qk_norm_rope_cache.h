// SPDX-License-Identifier: Apache-2.0
// The steps between the projection and attention in one launch: norms and rotation of queries and
// keys, and new keys and values into a paged cache.
#ifndef KERNELS_ROTARY_QK_NORM_ROPE_CACHE_H_
#define KERNELS_ROTARY_QK_NORM_ROPE_CACHE_H_

#include "kernels/rotary/kv_cache_write.h"
#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct QkNormRopeCacheCall {
  const TensorView* q = nullptr;      // [T, H, D] bfloat16 or float16, last dimension contiguous
  KvCacheCall kv;                     // new keys and values [T, Hk, D], caches, slots and scales
  const TensorView* q_out = nullptr;  // as q, which it may be, or float8_e4m3fn
  const TensorView* positions = nullptr;  // [T] int32 or int64
  const TensorView* angles = nullptr;     // [P, R]: cosines, then sines; float32 or q's dtype
  const TensorView* q_weight = nullptr;   // [D] float32 or q's dtype, or null: no norm
  const TensorView* k_weight = nullptr;
  const TensorView* q_scale = nullptr;  // float32, 1 or H elements, or null: 1
  double eps = 1e-6;
  bool interleaved = false;
};

struct QkNormRopeCachePlan {
  const char* kernel;  // "none" for an empty batch
  unsigned lanes;      // per head
  unsigned grid;
  unsigned block;
};

// Each head of q and k is normalised, x / sqrt(mean(x^2) + eps) * weight, if there is a weight, and
// rotated as by rotary_embedding; keys and values go to the cache as by kv_cache_write. Arithmetic
// is float32 and results are rounded once. Contents of `positions` and `slots` are bounded
// likewise.

// All checks and the choice of kernel; needs no GPU and no driver.
Status qk_norm_rope_cache_plan(const QkNormRopeCacheCall& call, QkNormRopeCachePlan* plan);

// Checks and chooses likewise, then launches on `stream` (a CUstream) of the tensors' device.
Status qk_norm_rope_cache(const QkNormRopeCacheCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_ROTARY_QK_NORM_ROPE_CACHE_H_
