// SPDX-License-Identifier: Apache-2.0
// The steps between the projection and attention in one launch: norms and rotation of queries and
// keys, with or without a write of new keys and values to a paged cache.
#ifndef KERNELS_ROTARY_QK_NORM_ROPE_CACHE_H_
#define KERNELS_ROTARY_QK_NORM_ROPE_CACHE_H_

#include "kernels/rotary/kv_cache_write.h"
#include "kernels/rotary/qk_heads.h"
#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct QkNormRopeCacheCall {
  QkHeads heads;                        // but `k`, which is `kv.key`
  KvCacheCall kv;                       // new keys and values [T, Hk, D], caches, slots and scales
  const TensorView* q_out = nullptr;    // as q, which it may be, or float8_e4m3fn
  const TensorView* q_scale = nullptr;  // float32, 1 or H elements, or null: 1
  // Multimodal rotary embedding, if `heads.has_sections`: how many of the R/2 pairs turn by each of
  // a token's three positions, in this order; or, interleaved, pairs 1, 4, 7, ... by the second and
  // 2, 5, 8, ... by the third, so many of each, and the others by the first.
  int64_t sections[3] = {};
  bool sections_interleaved = false;
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

// Norms and rotates likewise, by the same kernels, into tensors of the shapes and dtype of q and k.
struct QkNormRopeCall {
  QkHeads heads;
  const TensorView* q_out = nullptr;
  const TensorView* k_out = nullptr;
};

Status qk_norm_rope_plan(const QkNormRopeCall& call, QkNormRopeCachePlan* plan);
Status qk_norm_rope(const QkNormRopeCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_ROTARY_QK_NORM_ROPE_CACHE_H_
