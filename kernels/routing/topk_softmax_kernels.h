// SPDX-License-Identifier: Apache-2.0
// The interface of topk_softmax's host and device code: the kernels' argument and table.
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
  int vector_bytes;  // per load of scores; the size of a score if the inner stride is not 1
  bool all_scores;   // the weights' denominator is over the whole row, not over the selected
  bool descending;   // otherwise its terms are added in the order that suits the kernel
  bool int64_indices;
  bool early_launch;  // the dependent grid may be scheduled from the start, not only from the
                      // stores on
};

struct TopkSoftmaxKernel {
  DType dtype;
  int64_t max_rows;  // up to which this kernel is the fastest
  int max_experts;
  int max_k;
  int lanes_per_row;
  bool by_rounds;  // as topk_softmax_align selects
  Kernel kernel;
};

inline constexpr unsigned kTopkSoftmaxThreads = 128;  // at most, per block
// Of kernels with at least that many lanes a row, for at most so many selected, sums of these can
// have the order of those by rounds.
inline constexpr int kTopkDescendingLanes = 8;
inline constexpr int kTopkDescending = 8;

// All kernels, by dtype and preference; the first that covers a call is used.
const TopkSoftmaxKernel* topk_softmax_kernels(int* count);

// The kernels' parameters, and the columns of the results behind the k selected ones.
struct TopkLimits {
  int experts;
  int k;
  int64_t shared;
};

// The checks that all forms have in common, with errors in the name of `op`.
Status topk_check(const char* op, const TensorView& scores, const TensorView& weights,
                  const TensorView& indices, const TopkLimits& limits);

// True for a call that only the kernels of topk_route take. In the batch-invariant mode they take
// float32 too, whose sums topk_softmax and topk_softmax_align have in another order.
bool topk_is_large(const TensorView& scores, const TensorView& weights);

// A kernel and its launch shape.
struct TopkSoftmaxChoice {
  const TopkSoftmaxKernel* kernel;
  unsigned block;
  bool dependent;
};

// The checks of topk_softmax(), with errors in the name of `op`; its arguments and its choice.
Status topk_softmax_prepare(const char* op, const TensorView& scores, const TensorView& weights,
                            const TensorView& indices, const TopkSoftmaxOptions& options,
                            TopkSoftmaxArgs* args, TopkSoftmaxChoice* choice);

// Launches a choice, the default or one under tuning.
Status topk_softmax_launch(const TopkSoftmaxArgs& args, const TopkSoftmaxChoice& choice, int device,
                           void* stream);

}  // namespace tiercel

#endif  // KERNELS_ROUTING_TOPK_SOFTMAX_KERNELS_H_
