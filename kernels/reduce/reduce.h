// SPDX-License-Identifier: Apache-2.0
// Sum, mean or maximum over one dimension.
#ifndef KERNELS_REDUCE_REDUCE_H_
#define KERNELS_REDUCE_REDUCE_H_

#include <cstdint>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

enum class ReduceOp { kSum, kMean, kMax };

// What a call would launch.
struct ReduceCall {
  const TensorView* x = nullptr;
  const TensorView* out = nullptr;
  const TensorView* workspace = nullptr;  // or null
  int64_t dim = 0;
  ReduceOp op = ReduceOp::kSum;
};

struct ReducePlan {
  const char* kernel;  // "none" where there is no output
  const char* second;  // the kernel that combines partial results; "none" where one is enough
  int vector_bytes;    // of one load of x
  int parts;           // of the reduced dimension, in different blocks
  int cluster;         // blocks that combine theirs in shared memory
  unsigned grid;
  unsigned block;
  int64_t workspace;  // floats
};

// x has 1 to 8 dimensions, float32, bfloat16 or float16, any strides; `dim` is one of them (not
// negative). What is left of x's shape has to be at most two dimensions after those are joined that
// lie side by side in memory; a contiguous x always is. out: contiguous, as many elements as are
// left, of x's dtype or float32; its shape is the caller's affair. Sums are float32.
//
// A reduction that needs the whole GPU for few outputs goes through `workspace`, float32, at least
// as long as the plan says.

// All checks and the choice of kernels; needs no GPU and no driver. The choice does not depend on
// the device, and so neither does the order of a sum.
Status reduce_plan(const ReduceCall& call, ReducePlan* plan);

// Checks and chooses likewise, then launches on `stream` (a CUstream) of the tensors' device. Where
// a workspace is needed and `workspace` is null, nothing is launched and `*needed` says how many
// floats.
Status reduce(const ReduceCall& call, void* stream, int64_t* needed);

}  // namespace tiercel

#endif  // KERNELS_REDUCE_REDUCE_H_
