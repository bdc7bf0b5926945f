// SPDX-License-Identifier: Apache-2.0
// Attention of many queries, forward.
#ifndef KERNELS_ATTENTION_FORWARD_FORWARD_H_
#define KERNELS_ATTENTION_FORWARD_FORWARD_H_

#include "kernels/attention/common/options.h"

namespace tiercel {

// out = softmax(mask(cap(scale * q k^T))) v with float32 scores and sums, where
// cap(s) = softcap * tanh(s / softcap) unless softcap is 0.
//
// q is [B, Sq, H, D], out [B, Sq, H, Dv], k [B, Sk, Hk, D] and v [B, Sk, Hk, Dv], where Hk divides
// H: query head h reads key head h / (H / Hk). One dtype, bfloat16 or float16; any strides that are
// multiples of 16 bytes, the last dimension contiguous. lse, [B, H, Sq] float32 and contiguous, may
// be null: it gets the natural logarithm of each row's sum, minus infinity for a row that sees no
// key. sinks, [H] float32 and contiguous, may be null: a row's sum gets exp(sinks[h]) in addition.
struct AttentionCall {
  const TensorView* q = nullptr;
  const TensorView* k = nullptr;
  const TensorView* v = nullptr;
  const TensorView* out = nullptr;
  const TensorView* lse = nullptr;  // or null
  AttentionOptions options;
  const TensorView* sinks = nullptr;  // or null
};

// All checks and the choice of kernel for a device with that many multiprocessors; needs no GPU and
// no driver.
Status attention_plan(const AttentionCall& call, int multiprocessors, AttentionPlan* plan);

// Checks and chooses for the tensors' device, then launches on `stream` (a CUstream).
Status attention(const AttentionCall& call, void* stream);

// For sequences of several lengths behind each other.
Status attention_varlen_plan(const PackedAttention& call, int multiprocessors, AttentionPlan* plan);

Status attention_varlen(const PackedAttention& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_FORWARD_FORWARD_H_
