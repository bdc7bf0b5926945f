// SPDX-License-Identifier: Apache-2.0
// Attention over two sets of keys, from the attention over each.
#ifndef KERNELS_ATTENTION_MERGE_MERGE_H_
#define KERNELS_ATTENTION_MERGE_MERGE_H_

#include "kernels/sm90/launch.h"
#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct MergeCall {
  const TensorView* out_a = nullptr;  // [B, S, H, D] float32, bfloat16 or float16
  // [B, H, S] float32: natural logarithms; minus infinity: no keys
  const TensorView* lse_a = nullptr;
  const TensorView* out_b = nullptr;
  const TensorView* lse_b = nullptr;
  const TensorView* out = nullptr;  // may be out_a or out_b
  const TensorView* lse = nullptr;
};

// The launch of a call.
struct MergePlan {
  const char* kernel;  // "none" for an empty output
  unsigned grid;
  unsigned block;
};

// All checks and the choice of kernel; needs no GPU and no driver.
Status merge_attention_states_plan(const MergeCall& call, MergePlan* plan);

// Checks, then launches on `stream` (a CUstream) of the tensors' device.
Status merge_attention_states(const MergeCall& call, void* stream);

// The launch configuration, for host and kernels.
inline constexpr unsigned kMergeThreads = 256;

struct MergeArgs {
  const char* a;
  const char* b;
  char* out;
  const float* lse_a;
  const float* lse_b;
  float* lse;
  int64_t a_strides[3];  // bytes: sequence, query, head
  int64_t b_strides[3];
  int64_t out_strides[3];
  int64_t vectors;  // of 16 bytes, in all
  int queries;
  int heads;
  int row_vectors;
};

struct MergeKernel {
  DType dtype;
  Kernel kernel;
};

const MergeKernel* merge_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_MERGE_MERGE_H_
