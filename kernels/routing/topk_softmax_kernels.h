// SPDX-License-Identifier: Apache-2.0
// What topk_softmax's launcher and its device code agree on: the kernels' argument and the table of
// kernels.
#ifndef KERNELS_ROUTING_TOPK_SOFTMAX_KERNELS_H_
#define KERNELS_ROUTING_TOPK_SOFTMAX_KERNELS_H_

#include <cstdint>

#include "kernels/routing/topk_softmax.h"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct TopkSoftmaxArgs {
  const void* scores;
  int64_t row_stride;    // bytes
  int64_t inner_stride;  // bytes
  float* weights;
  void* indices;
  int64_t rows;
  int experts;
  int k;
  int vector_bytes;   // one load of scores; a score's own size where the inner stride is not 1
  bool all_scores;    // the weights' denominator is over the whole row, not over the selected
  bool wide_indices;  // int64
  bool early_launch;  // a dependent grid may be scheduled from the start, not from the stores on
};

struct TopkSoftmaxKernel {
  DType dtype;
  int64_t max_rows;  // up to which it is the best
  int max_experts;
  int max_k;
  int lanes_per_row;
  Kernel kernel;
};

inline constexpr unsigned kTopkSoftmaxThreads = 128;  // at most, a block

// All kernels, by dtype and preference: of those that cover a call, the first is taken.
const TopkSoftmaxKernel* topk_softmax_kernels(int* count);

// A kernel and how to launch it.
struct TopkSoftmaxChoice {
  const TopkSoftmaxKernel* kernel;
  unsigned block;
  bool dependent;
};

// The checks of topk_softmax(), in the name of `op`, its arguments and the choice that it makes for
// them.
Status topk_softmax_prepare(const char* op, const TensorView& scores, const TensorView& weights,
                            const TensorView& indices, const TopkSoftmaxOptions& options,
                            TopkSoftmaxArgs* args, TopkSoftmaxChoice* choice);

// Launches a choice, the default one or a tuner's.
Status topk_softmax_launch(const TopkSoftmaxArgs& args, const TopkSoftmaxChoice& choice, int device,
                           void* stream);

}  // namespace tiercel

#endif  // KERNELS_ROUTING_TOPK_SOFTMAX_KERNELS_H_
