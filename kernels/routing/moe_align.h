// SPDX-License-Identifier: Apache-2.0
// Chosen experts sorted by expert, each expert's share padded to whole blocks.
#ifndef KERNELS_ROUTING_MOE_ALIGN_H_
#define KERNELS_ROUTING_MOE_ALIGN_H_

#include <cstdint>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kMoeAlignMaxExperts = 1024;

struct MoeAlignOptions {
  int64_t block_size = 0;
  int64_t num_experts = 0;
  bool ignore_invalid = false;  // experts that the map lacks are left out, not only marked
};

// The outputs, all int32 and contiguous.
struct MoeAlignOutputs {
  const TensorView* sorted_token_ids = nullptr;  // [slots], at least moe_align_slots()
  const TensorView* expert_ids = nullptr;        // [slots / block_size, rounded up]
  const TensorView* num_tokens_post_padded =
      nullptr;  // [1], or [3 + blocks] with counters that become 0
};

// What a call would launch.
struct MoeAlignCall {
  const TensorView* topk_ids = nullptr;
  const TensorView* expert_map = nullptr;  // or null
  MoeAlignOutputs outputs;
  const TensorView* workspace = nullptr;  // or null
  MoeAlignOptions options;
};

struct MoeAlignPlan {
  const char* kernel;
  unsigned items;    // ids a thread holds
  unsigned cluster;  // thread blocks of a cluster; 1: none
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
  unsigned launches;
};

// Slots that ids of any distribution fit in.
int64_t moe_align_slots(int64_t numel, int64_t num_experts, int64_t block_size);

// int32 elements of workspace that a call needs, which need no initial value; 0 for one launch.
int64_t moe_align_workspace(int64_t numel, int64_t num_experts);

// topk_ids [T, k] int32 or int64, contiguous. sorted_token_ids gets the numbers of topk_ids'
// elements by expert and, within one, ascending; behind each expert's up to a whole block, and
// behind them all, T * k. expert_ids gets each block's expert, -1 for blocks behind the last. Ids
// outside of 0 to num_experts - 1 are left out. expert_map [num_experts] int32 or null: from an
// expert to its number here or -1. With `ignore_invalid` ids are mapped first and those of -1 left
// out; else expert_ids are mapped.

// All checks and the choice of kernel; needs no GPU and no driver.
Status moe_align_plan(const MoeAlignCall& call, MoeAlignPlan* plan);

// The same, then the launch or launches on `stream` (a CUstream) of the tensors' device.
Status moe_align(const MoeAlignCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_ROUTING_MOE_ALIGN_H_
