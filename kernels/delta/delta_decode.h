// SPDX-License-Identifier: Apache-2.0
// A step of the gated delta rule with a pool of states.
#ifndef KERNELS_DELTA_DELTA_DECODE_H_
#define KERNELS_DELTA_DELTA_DECODE_H_

#include <cstdint>
#include <limits>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// The launch of a call.
struct DeltaDecodePlan {
  const char* kernel;  // "none" if there is nothing to do
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
};

// q, k [B, T, Hk, K] and v, out [B, T, Hv, V] bfloat16 or float16 with contiguous heads, Hv a
// multiple of Hk; g [B, T, Hv] or [B, T, Hv, K] float32; beta [B, T, Hv] float32 or q's dtype;
// states [slots, Hv, K, V] float32 or bfloat16, contiguous slots.
//
// state_indices [B] or [B, 1]: the slot that a sequence's state is read from and written to. [B,
// T]: the slots that the states after each token go to; it is read from column accepted - 1, the
// first without `accepted` [B]. null: the sequence's number. A number that is no slot: zeros, not
// kept.
struct DeltaDecodeCall {
  const TensorView* q = nullptr;
  const TensorView* k = nullptr;
  const TensorView* v = nullptr;
  const TensorView* g = nullptr;
  const TensorView* beta = nullptr;
  const TensorView* states = nullptr;
  const TensorView* out = nullptr;
  const TensorView* state_indices = nullptr;              // int32 or null
  const TensorView* accepted = nullptr;                   // int32 or null
  float scale = std::numeric_limits<float>::quiet_NaN();  // NaN: 1 / sqrt(K)
  bool qk_l2norm = false;
};
Status delta_decode_plan(const DeltaDecodeCall& call, DeltaDecodePlan* plan);
Status delta_decode(const DeltaDecodeCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_DELTA_DELTA_DECODE_H_
