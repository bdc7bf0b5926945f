// SPDX-License-Identifier: Apache-2.0
// Attention of e4m3 queries, keys and values, forward.
#ifndef KERNELS_ATTENTION_FP8_FP8_H_
#define KERNELS_ATTENTION_FP8_FP8_H_

#include "kernels/attention/common/options.h"

namespace tiercel {

// Attention of q * q_descale, k * k_descale and v * v_descale: float32 factors per head of keys,
// [B, Hk], [Hk] or one element, any strides; null is 1. q, k and v are e4m3, out is bfloat16. The
// workspace holds transposed values and the factors: uint8, contiguous, 16-byte aligned, of the
// plan's size.
//
// `starts` are those of attention_varlen: then q and out are [Tq, H, D], k and v [Tk, Hk, D].
struct AttentionFp8Call {
  const TensorView* q = nullptr;
  const TensorView* k = nullptr;
  const TensorView* v = nullptr;
  const TensorView* out = nullptr;
  const TensorView* lse = nullptr;
  const TensorView* q_descale = nullptr;
  const TensorView* k_descale = nullptr;
  const TensorView* v_descale = nullptr;
  const TensorView* workspace = nullptr;  // the plan ignores it
  const TensorView* starts_q = nullptr;
  const TensorView* starts_k = nullptr;
  int64_t max_q = 0;
  int64_t max_k = 0;
  AttentionOptions options;

  const char* op() const { return starts_q == nullptr ? "attention" : "attention_varlen"; }
};

// The second one of a call's two launches.
struct AttentionFp8Plan {
  AttentionPlan attention;
  int64_t workspace;
};

Status attention_fp8_plan(const AttentionFp8Call& call, int multiprocessors,
                          AttentionFp8Plan* plan);

Status attention_fp8(const AttentionFp8Call& call, void* stream);

// Loads the kernels on a device.
Status attention_fp8_load(int device);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_FP8_FP8_H_
