// SPDX-License-Identifier: Apache-2.0
// Gradients of the gated delta rule over prompts.
#ifndef KERNELS_DELTA_DELTA_BACKWARD_H_
#define KERNELS_DELTA_DELTA_BACKWARD_H_

#include <cstdint>

#include "kernels/delta/delta_rule.h"

namespace tiercel {

// The launches of a call.
struct DeltaBackwardPlan {
  const char* chunks;      // the first kernel, "none" if there is nothing to do
  const char* passes;      // the second; of segments the fourth, whose second is the same kernel
  const char* gradients;   // the last
  int groups;              // warpgroups that multiply, of a block of the last passes
  int64_t segment_chunks;  // chunks of a segment; 0: sequences are not divided
  int64_t chunk_grid;      // of the first and the last, times Hk, or the first's times Hv
  int64_t pass_grid;
  int64_t workspace;  // float32 elements
};

// `rule`: what the results were made of, with `out` the results' gradient, and `final_state` the
// final states', or null. dq, dk, dv as q, k, v, dg and dbeta as g and beta, all
// contiguous; grad_initial [N or B, Hv, K, V] float32, or null.
struct DeltaBackwardCall {
  DeltaRuleCall rule;
  const TensorView* dq = nullptr;
  const TensorView* dk = nullptr;
  const TensorView* dv = nullptr;
  const TensorView* dg = nullptr;
  const TensorView* dbeta = nullptr;
  const TensorView* grad_initial = nullptr;  // or null
};
Status delta_backward_plan(const DeltaBackwardCall& call, DeltaBackwardPlan* plan);
Status delta_backward(const DeltaBackwardCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_DELTA_DELTA_BACKWARD_H_
