// SPDX-License-Identifier: Apache-2.0
// Host code that the ops share which write to a paged cache.
#ifndef KERNELS_ROTARY_KV_CACHE_PREPARE_H_
#define KERNELS_ROTARY_KV_CACHE_PREPARE_H_

#include "kernels/rotary/kv_cache_write.h"
#include "kernels/rotary/rotary_kernels.h"
#include "kernels/sm90/checks.h"

namespace tiercel {

// An op's names in error texts.
struct KvNames {
  const char* op;
  const char* key;
  const char* value;
  const char* heads;
  const char* shape;        // of key and value
  const char* cache_shape;  // of both caches
};

// Unimplemented unless the last dimension is contiguous.
Status check_inner(const Argument& argument);

// The scale of a float8 tensor: one element or one per head; `symbol` names that number.
Status check_float8_scale(const Argument& scale, const Argument& like, const char* symbol,
                          int64_t heads);

HeadsOfTokens heads_of(const TensorView& view);

// The data of a scale or null.
const float* set_scale(const TensorView* scale, bool* per_head);

// Checks the call and fills all but `prefetch_blocks`. `elements`: of the vectors that strides and
// addresses allow, 8 or 1.
Status prepare_kv_cache(const KvNames& names, const KvCacheCall& call, KvCacheArgs* args,
                        int* elements);

}  // namespace tiercel

#endif  // KERNELS_ROTARY_KV_CACHE_PREPARE_H_
