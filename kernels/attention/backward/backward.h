// SPDX-License-Identifier: Apache-2.0
// The gradients of attention's q, k and v.
#ifndef KERNELS_ATTENTION_BACKWARD_BACKWARD_H_
#define KERNELS_ATTENTION_BACKWARD_BACKWARD_H_

#include "kernels/attention/common/options.h"

namespace tiercel {

// Tensors as those of attention, or with both starts as those of attention_varlen. grad is out's
// gradient; out and lse are what attention gave, and grad_lse, of lse's shape, float32 and
// contiguous, may be null. dq, dk and dv have the shapes of q, k and v. The workspace is float32
// and contiguous, of as many elements as the plan says.
struct AttentionBackwardCall {
  const TensorView* grad = nullptr;
  const TensorView* q = nullptr;
  const TensorView* k = nullptr;
  const TensorView* v = nullptr;
  const TensorView* starts_q = nullptr;
  const TensorView* starts_k = nullptr;
  const TensorView* out = nullptr;
  const TensorView* lse = nullptr;
  const TensorView* grad_lse = nullptr;
  const TensorView* dq = nullptr;
  const TensorView* dk = nullptr;
  const TensorView* dv = nullptr;
  const TensorView* workspace = nullptr;  // the plan ignores it
  AttentionOptions options;
  bool deterministic = false;
};

// The launch of a call that computes the gradients: one comes before and one after it, and of
// sequences of several lengths one more before.
struct AttentionBackwardPlan {
  const char* kernel;  // "none" for no queries or no keys
  int tile_m;          // queries a step
  int tile_n;          // keys a tile
  int band;            // heads whose tiles alternate
  bool descending;     // tiles of late keys come first
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
  int64_t workspace;  // elements
};

// dk and dv are sums in a fixed order. dq is a sum of one part per tile of keys, in the order
// in which they finish, or in the order of the keys if `deterministic`.
Status attention_backward_plan(const AttentionBackwardCall& call, int multiprocessors,
                               AttentionBackwardPlan* plan);

Status attention_backward(const AttentionBackwardCall& call, void* stream);

// The gradients of attention_varlen, of all sequences at once. The host never knows their lengths:
// starts may hold anything, and no time or memory depends on how long the longest one is. Each row
// of dq, dk and dv is written, with zeros where it is in no sequence.
Status attention_varlen_backward_plan(const AttentionBackwardCall& call, int multiprocessors,
                                      AttentionBackwardPlan* plan);

Status attention_varlen_backward(const AttentionBackwardCall& call, void* stream);

// Loads the kernels on a device.
Status attention_backward_load(int device);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_BACKWARD_BACKWARD_H_
