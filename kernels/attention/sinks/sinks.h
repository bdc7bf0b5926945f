// SPDX-License-Identifier: Apache-2.0
// The gradients of attention's sinks.
#ifndef KERNELS_ATTENTION_SINKS_SINKS_H_
#define KERNELS_ATTENTION_SINKS_SINKS_H_

#include "kernels/sm90/launch.h"
#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// dsinks[h] is minus the sum over all rows of exp(sinks[h] - lse) * (rowsum(grad * out) -
// grad_lse), without rows whose lse is minus infinity.
//
// grad and out are [B, S, H, D], bfloat16 or float16, any strides that are multiples of 16 bytes,
// the last dimension contiguous; lse and grad_lse [B, H, S], sinks and dsinks [H], float32 and
// contiguous. grad_lse may be null. The workspace is float32 and contiguous, of as many elements as
// the plan says.
struct AttentionSinksCall {
  const TensorView* grad = nullptr;
  const TensorView* out = nullptr;
  const TensorView* lse = nullptr;
  const TensorView* grad_lse = nullptr;
  const TensorView* sinks = nullptr;
  const TensorView* dsinks = nullptr;
  const TensorView* workspace = nullptr;  // the plan ignores it
};

// The first of a call's two launches.
struct AttentionSinksPlan {
  const char* kernel;  // "none" for no heads
  int parts;           // of a head's rows, a block each
  unsigned grid;
  unsigned block;
  int64_t workspace;  // elements
};

// All checks and the choice of kernel; needs no GPU and no driver.
Status attention_sinks_backward_plan(const AttentionSinksCall& call, AttentionSinksPlan* plan);

// Checks, then launches on `stream` (a CUstream) of the tensors' device. The sums' order depends on
// the sizes alone.
Status attention_sinks_backward(const AttentionSinksCall& call, void* stream);

// Loads the kernels on a device.
Status attention_sinks_load(int device);

// The launch configuration, for host and kernels.
inline constexpr int kAttentionSinksThreads = 256;
inline constexpr int kAttentionSinksParts = 64;  // at most

// [batch, rows, heads, columns], strides in bytes.
struct AttentionSinksRows {
  const char* data;
  int64_t batch_stride, row_stride, head_stride;
};

struct AttentionSinksArgs {
  AttentionSinksRows grad;
  AttentionSinksRows out;
  const float* lse;
  const float* grad_lse;  // or null
  const float* sinks;
  float* sums;  // [heads, parts]
  float* dsinks;
  int rows;   // of a batch entry
  int count;  // of a head's rows in all entries
  int heads;
  int parts;
  int d;
  int lanes;  // a row, 16 bytes each: a power of two
};

struct AttentionSinksKernel {
  DType dtype;
  Kernel kernel;
};

const AttentionSinksKernel* attention_sinks_kernels(int* count);
const Kernel& attention_sinks_sum_kernel();

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_SINKS_SINKS_H_
