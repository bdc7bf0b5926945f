// SPDX-License-Identifier: Apache-2.0
// Attention of e4m3 queries, keys and values, forward.
#ifndef KERNELS_ATTENTION_ATTENTION_FP8_H_
#define KERNELS_ATTENTION_ATTENTION_FP8_H_

#include "kernels/attention/attention.h"

namespace tiercel {

// As attention, of q * q_descale, k * k_descale and v * v_descale: float32 factors for the heads of
// keys, [B, Hk], [Hk] or one element, any strides; each may be null, which is 1. q, k and v are
// e4m3, out is bfloat16. The workspace is uint8, contiguous and on 16 bytes, of as many bytes as
// the plan says: transposed values and the factors.
//
// With `starts`, as attention_varlen: q and out are [Tq, H, D], k and v [Tk, Hk, D].
struct AttentionFp8Call {
  const TensorView* q;
  const TensorView* k;
  const TensorView* v;
  const TensorView* out;
  const TensorView* lse;
  const TensorView* q_descale;
  const TensorView* k_descale;
  const TensorView* v_descale;
  const TensorView* workspace;  // not looked at by the plan
  const TensorView* starts_q = nullptr;
  const TensorView* starts_k = nullptr;
  int64_t max_q = 0;
  int64_t max_k = 0;

  const char* op() const { return starts_q == nullptr ? "attention" : "attention_varlen"; }
};

// Of the second of two kernels.
struct AttentionFp8Plan {
  AttentionPlan attention;
  int64_t workspace;
};

Status attention_fp8_plan(const AttentionFp8Call& call, const AttentionOptions& options,
                          int multiprocessors, AttentionFp8Plan* plan);

Status attention_fp8(const AttentionFp8Call& call, const AttentionOptions& options, void* stream);

// Loads the kernels on a device.
Status attention_fp8_load(int device);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_ATTENTION_FP8_H_
