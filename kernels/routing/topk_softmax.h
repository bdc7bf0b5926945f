// SPDX-License-Identifier: Apache-2.0
// The k largest of each row of router scores, with their softmax weights.
#ifndef KERNELS_ROUTING_TOPK_SOFTMAX_H_
#define KERNELS_ROUTING_TOPK_SOFTMAX_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kTopkSoftmaxMaxExperts = 512;
inline constexpr int kTopkSoftmaxMaxK = 16;

struct TopkSoftmaxOptions {
  bool softmax_first = true;  // weights = softmax(scores)[selected]; else softmax(scores[selected])
  bool renormalize = false;   // then divide the selected weights by their sum
};

// What a call would launch.
struct TopkSoftmaxCall {
  const TensorView* scores = nullptr;
  const TensorView* weights = nullptr;
  const TensorView* indices = nullptr;
  TopkSoftmaxOptions options;
};

struct TopkSoftmaxPlan {
  const char* kernel;  // "none" for an empty batch
  int rows_per_block;
  int lanes_per_row;
  int vector_bytes;  // width of one load of scores
  unsigned grid;
  unsigned block;
};

// scores [T, E] float32, bfloat16 or float16, any strides; weights [T, k] float32 and indices [T,
// k] int32 or int64, both contiguous. Exact selection on the scores: descending, ties by lowest
// index, -0 equals +0, NaN above everything. A row that holds NaN or +inf, or nothing but -inf,
// gets NaN weights. k is weights' second dimension.

// All checks and the choice of kernel; needs no GPU and no driver.
Status topk_softmax_plan(const TopkSoftmaxCall& call, TopkSoftmaxPlan* plan);

// Checks and chooses likewise, then launches on `stream` (a CUstream) of the tensors' device.
Status topk_softmax(const TopkSoftmaxCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_ROUTING_TOPK_SOFTMAX_H_
