// SPDX-License-Identifier: Apache-2.0
// The interface of topk_route's host and device code.
#ifndef KERNELS_ROUTING_TOPK_ROUTE_KERNELS_H_
#define KERNELS_ROUTING_TOPK_ROUTE_KERNELS_H_

#include <cstdint>

#include "kernels/routing/topk_align_kernels.h"
#include "kernels/routing/topk_route.h"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct TopkRouteArgs {
  const void* scores;
  int64_t row_stride;    // bytes
  int64_t inner_stride;  // bytes
  const float* bias;     // or null
  float* weights;
  void* indices;
  int64_t rows;
  int experts;
  int k;
  int shared;
  int group;   // experts of a group
  int groups;  // a group has 32 / groups lanes, rounded down to a power of two
  int kept_groups;
  int lanes_per_group;
  int lane_shift;    // its logarithm
  int per_lane;      // experts of a lane, but for the last ones of a group
  int vector_bytes;  // per load of scores
  TopkScoring scoring;
  float scaling;
  bool bias_vectors;  // loads of the bias are of 16 bytes
  bool all_scores;    // softmax: over the whole row, not over the selected
  bool renormalize;
  bool int64_indices;
  bool early_launch;  // as in TopkSoftmaxArgs
};

// Experts by token, without a selection: bias, groups and what follows from them are not read.
struct HashRouteArgs : TopkRouteArgs {
  const void* token_ids;
  const int32_t* table;  // [tokens, k]
  int64_t tokens;        // of the table
  DType dtype;           // of the scores
  bool int64_tokens;
};

struct HashRouteKernel {
  bool aligned;  // with the alignment
  Kernel kernel;
};

struct TopkRouteKernel {
  DType dtype;
  int per_lane;
  bool aligned;  // with the alignment
  Kernel kernel;
};

inline constexpr unsigned kTopkRouteThreads = 128;
// At most: more than those of topk_softmax_align.
inline constexpr unsigned kTopkRouteAlignThreads = 1024;
inline constexpr uint32_t kTopkRouteAlignSharedBytes = 128 * 1024;

// By dtype and size; the first that covers a call is used.
const TopkRouteKernel* topk_route_kernels(int* count);
const HashRouteKernel* hash_route_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_ROUTING_TOPK_ROUTE_KERNELS_H_
