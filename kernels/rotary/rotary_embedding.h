// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of queries and keys in one launch.
#ifndef KERNELS_ROTARY_ROTARY_EMBEDDING_H_
#define KERNELS_ROTARY_ROTARY_EMBEDDING_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct RotaryCall {
  const TensorView* positions = nullptr;  // [T] int32 or int64
  const TensorView* q =
      nullptr;  // [T, H, D] float32, bfloat16 or float16, last dimension contiguous
  const TensorView* k = nullptr;  // [T, Hk, D], the same; Hk may be 0
  const TensorView* cache =
      nullptr;  // [P, R] contiguous: cosines, then sines; float32 or q's dtype
  const TensorView* q_out = nullptr;  // as q; may be q itself
  const TensorView* k_out = nullptr;
  bool interleaved = false;
};

// What a call would launch.
struct RotaryPlan {
  const char* kernel;  // "none" for an empty batch
  int vector_bytes;
  unsigned grid;
  unsigned block;
};

// Pairs (x, y) of a head's first R elements become (x cos - y sin, y cos + x sin): elements i and
// i + R / 2, or, interleaved, 2 i and 2 i + 1. The others are copied. Arithmetic is float32.
// A position that is no row of `cache` takes the nearest one.

// All checks and the choice of kernel; needs no GPU and no driver.
Status rotary_plan(const RotaryCall& call, RotaryPlan* plan);

// Checks and chooses likewise, then launches on `stream` (a CUstream) of the tensors' device.
Status rotary_embedding(const RotaryCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_ROTARY_ROTARY_EMBEDDING_H_
