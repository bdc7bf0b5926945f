// SPDX-License-Identifier: Apache-2.0
// The gated delta rule over prompts.
#ifndef KERNELS_DELTA_DELTA_RULE_H_
#define KERNELS_DELTA_DELTA_RULE_H_

#include <cstdint>
#include <limits>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// The launches of a call.
struct DeltaRulePlan {
  const char* chunks;      // the first kernel, "none" if there is nothing to do
  const char* kernel;      // the last
  int groups;              // warpgroups that multiply, of its blocks
  int64_t segment_chunks;  // chunks of a segment; 0: sequences are not divided
  int64_t chunk_grid;      // blocks of the first, times
  int64_t chunk_rows;
  int64_t beside;  // blocks of the first kernel that run beside the last one; 0: one waits
  int64_t grid;
  unsigned dynamic_smem;
  int64_t workspace;  // float32 elements
};

// q, k [B, T, Hk, K] and v, out [B, T, Hv, V] 16-bit, contiguous heads on 16 bytes, Hv a multiple
// of Hk; g [B, T, Hv] or [B, T, Hv, K] float32; beta [B, T, Hv] float32 or bfloat16, both
// contiguous. With cu_seqlens [N + 1] int32, B is 1 and tokens between two starts are a sequence;
// others get 0. initial_state and final_state [N or B, Hv, K, V] float32, or null. workspace:
// float32, as long as the plan says.
struct DeltaRuleCall {
  const TensorView* q = nullptr;
  const TensorView* k = nullptr;
  const TensorView* v = nullptr;
  const TensorView* g = nullptr;
  const TensorView* beta = nullptr;
  const TensorView* out = nullptr;
  const TensorView* initial_state = nullptr;              // or null
  const TensorView* final_state = nullptr;                // or null
  const TensorView* cu_seqlens = nullptr;                 // or null
  const TensorView* workspace = nullptr;                  // null for a plan
  float scale = std::numeric_limits<float>::quiet_NaN();  // NaN: 1 / sqrt(K)
  bool qk_l2norm = false;
};
Status delta_rule_plan(const DeltaRuleCall& call, DeltaRulePlan* plan);
Status delta_rule(const DeltaRuleCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_DELTA_DELTA_RULE_H_
