// SPDX-License-Identifier: Apache-2.0
// Arguments and plans that attention's forward, FP8 and backward share.
#ifndef KERNELS_ATTENTION_COMMON_OPTIONS_H_
#define KERNELS_ATTENTION_COMMON_OPTIONS_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// Query i sees the keys from i + Sk - Sq - left to i + Sk - Sq + right; a negative left or right
// means no limit, and causal is right = 0.
struct AttentionOptions {
  int64_t left = -1;
  int64_t right = -1;
  double scale = 1.0;
  double softcap = 0.0;
};

enum class AttentionMask { kNone, kCausal, kWindow };  // the kernels' kinds

// The launch of a call.
struct AttentionPlan {
  const char* kernel;  // "none" for an empty output
  int tile_m;          // queries per tile
  int tile_n;          // keys per step
  int band;            // heads whose tiles alternate, so that their keys are read from the L2
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
};

// Sequences of several lengths, behind each other: q is [Tq, H, D], k [Tk, Hk, D], v [Tk, Hk, Dv]
// and out [Tq, H, Dv]; lse, [H, Tq], may be null. Sequence i has the rows from starts[i] to
// starts[i + 1] of int32 [B + 1], of any stride and contents: both are cut to the tensor, and a
// sequence that ends before it starts is empty. Rows of out that no sequence has are 0, and minus
// infinity in lse; so are those that a sequence longer than max_q, rounded up to a tile, has beyond
// it.
struct PackedAttention {
  const TensorView* q = nullptr;
  const TensorView* k = nullptr;
  const TensorView* v = nullptr;
  const TensorView* out = nullptr;
  const TensorView* lse = nullptr;
  const TensorView* starts_q = nullptr;
  const TensorView* starts_k = nullptr;
  int64_t max_q = 0;
  int64_t max_k = 0;
  AttentionOptions options;
  const TensorView* sinks = nullptr;  // or null; those of attention
};

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_COMMON_OPTIONS_H_
