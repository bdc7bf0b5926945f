// SPDX-License-Identifier: Apache-2.0
// The interface of topk_softmax_align's host and device code.
#ifndef KERNELS_ROUTING_TOPK_ALIGN_KERNELS_H_
#define KERNELS_ROUTING_TOPK_ALIGN_KERNELS_H_

#include <cstdint>

#include "kernels/routing/moe_align_kernels.h"
#include "kernels/routing/topk_align.h"
#include "kernels/routing/topk_softmax_kernels.h"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kTopkAlignRows = 16;  // per block, one per warp
inline constexpr unsigned kTopkAlignThreads = 32 * kTopkAlignRows;
inline constexpr int kTopkAlignMaxCluster = 8;
static_assert(kTopkAlignRows * kTopkAlignMaxCluster == kTopkAlignMaxTokens);
inline constexpr uint32_t kTopkAlignMaxSharedBytes = 64 * 1024;

struct TopkAlignKernel {
  DType dtype;
  int max_experts;
  Kernel kernel;
};

// By dtype and size; the first kernel that covers a call is used.
const TopkAlignKernel* topk_align_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_ROUTING_TOPK_ALIGN_KERNELS_H_
