// SPDX-License-Identifier: Apache-2.0
// topk_softmax and moe_align_block_size in one launch, for few tokens.
#ifndef KERNELS_ROUTING_TOPK_ALIGN_H_
#define KERNELS_ROUTING_TOPK_ALIGN_H_

#include "kernels/routing/moe_align.h"
#include "kernels/routing/topk_softmax.h"
#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// Tokens that one launch takes.
inline constexpr int kTopkAlignMaxTokens = 128;

// What a call would launch.
struct TopkAlignCall {
  const TensorView* scores = nullptr;
  const TensorView* weights = nullptr;
  const TensorView* indices = nullptr;
  const TensorView* expert_map = nullptr;  // or null
  MoeAlignOutputs outputs;
  TopkSoftmaxOptions topk;
  MoeAlignOptions align;  // num_experts: the scores' columns
};

struct TopkAlignPlan {
  const char* kernel;
  unsigned cluster;
  unsigned block;
  unsigned dynamic_smem;
};

// As topk_softmax(scores, weights, indices) and then moe_align(indices, expert_map, outputs), with
// align.num_experts the number of scores of a row.

// All checks and the choice of kernel; needs no GPU and no driver.
Status topk_align_plan(const TopkAlignCall& call, TopkAlignPlan* plan);

// Checks and chooses likewise, then launches on `stream` (a CUstream) of the tensors' device.
Status topk_align(const TopkAlignCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_ROUTING_TOPK_ALIGN_H_
