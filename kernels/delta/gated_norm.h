// SPDX-License-Identifier: Apache-2.0
// The norm of linear attention's output, times its gate.
#ifndef KERNELS_DELTA_GATED_NORM_H_
#define KERNELS_DELTA_GATED_NORM_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct GatedNormPlan {
  const char* kernel;  // "none" if there is nothing to do
  int lanes;           // of a row
  unsigned grid;
};

// out = x / sqrt(mean(x^2) + eps) * weight * silu(gate) over the last dimension. x and gate [...,
// N] of one 16-bit dtype, rows a multiple of 16 bytes apart; weight [N] of that dtype or float32;
// out contiguous.
struct GatedNormCall {
  const TensorView* x = nullptr;
  const TensorView* gate = nullptr;
  const TensorView* weight = nullptr;
  const TensorView* out = nullptr;
  float eps = 0.0f;
};
Status gated_norm_plan(const GatedNormCall& call, GatedNormPlan* plan);
Status gated_norm(const GatedNormCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_DELTA_GATED_NORM_H_
