// SPDX-License-Identifier: Apache-2.0
// Attention of many queries, forward.
#ifndef KERNELS_ATTENTION_ATTENTION_H_
#define KERNELS_ATTENTION_ATTENTION_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// out = softmax(mask(cap(scale * q k^T))) v with float32 scores and sums, where
// cap(s) = softcap * tanh(s / softcap) unless softcap is 0.
//
// q and out are [B, Sq, H, D]; k and v are [B, Sk, Hk, D], where Hk divides H: query head h reads
// key head h / (H / Hk). One dtype, bfloat16 or float16; any strides that are multiples of 16
// bytes, the last dimension contiguous. lse, [B, H, Sq] float32 and contiguous, may be null: it
// gets the natural logarithm of each row's sum, minus infinity for a row that sees no key.
//
// Query i sees the keys from i + Sk - Sq - left to i + Sk - Sq + right; a negative left or right
// means no limit, and causal is right = 0.
struct AttentionOptions {
  int64_t left = -1;
  int64_t right = -1;
  double scale = 1.0;
  double softcap = 0.0;
};

// What a call would launch.
struct AttentionPlan {
  const char* kernel;  // "none" for an empty output
  int tile_m;          // queries a tile
  int tile_n;          // keys a step
  int band;            // heads whose tiles alternate, so that their keys are read from the L2
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
};

// All checks and the choice of kernel for a device with that many multiprocessors; needs no GPU and
// no driver.
Status attention_plan(const TensorView& q, const TensorView& k, const TensorView& v,
                      const TensorView& out, const TensorView* lse, const AttentionOptions& options,
                      int multiprocessors, AttentionPlan* plan);

// The same for the tensors' device, then the launch on `stream` (a CUstream).
Status attention(const TensorView& q, const TensorView& k, const TensorView& v,
                 const TensorView& out, const TensorView* lse, const AttentionOptions& options,
                 void* stream);

// Sequences of several lengths, behind each other: q and out are [Tq, H, D], k and v [Tk, Hk, D],
// lse, [H, Tq], may be null. Sequence i has the rows from starts[i] to starts[i + 1] of int32
// [B + 1], of any stride and contents: both are cut to the tensor, and a sequence that ends before
// it starts is empty. Rows of out that no sequence has are 0, and minus infinity in lse; so are
// those that a sequence longer than max_q, rounded up to a tile, has beyond it.
struct PackedAttention {
  const TensorView* q;
  const TensorView* k;
  const TensorView* v;
  const TensorView* out;
  const TensorView* lse;
  const TensorView* starts_q;
  const TensorView* starts_k;
  int64_t max_q;
  int64_t max_k;
};

Status attention_varlen_plan(const PackedAttention& call, const AttentionOptions& options,
                             int multiprocessors, AttentionPlan* plan);

Status attention_varlen(const PackedAttention& call, const AttentionOptions& options, void* stream);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_ATTENTION_H_
