// SPDX-License-Identifier: Apache-2.0
// Normalisation over the last dimension, with what is added before it, forward and backward.
#ifndef KERNELS_NORM_NORM_H_
#define KERNELS_NORM_NORM_H_

#include <cstdint>
#include <optional>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int64_t kNormMaxColumns = 131072;

// root mean square: x / sqrt(mean(x^2) + eps); layer: (x - mean(x)) / sqrt(var(x) + eps).
enum class NormKind { kRms, kLayer };

// out = norm(x + residual) * weight + bias, row by row; residual_out = x + residual. All but x and
// out may be null; residual and residual_out come together.
// x [..., N] float32, bfloat16 or float16, residual the same with any strides; out and residual_out
// [..., N] of x's dtype, contiguous; they may be x and residual themselves. weight and bias [N], of
// x's dtype or float32, contiguous. Statistics and arithmetic are float32; x + residual is rounded
// to x's dtype first, so that out is a function of residual_out.
struct NormForward {
  NormKind kind = NormKind::kRms;
  const TensorView* x = nullptr;
  const TensorView* weight = nullptr;
  const TensorView* bias = nullptr;
  const TensorView* residual = nullptr;
  const TensorView* out = nullptr;
  const TensorView* residual_out = nullptr;
  float eps = 0.0f;
};

// How norm_backward and norm_backward_short are launched.
struct NormBackwardConfig {
  int vectors;            // of 16 bytes, per thread and row
  int rows;               // that a thread works on at once
  int cluster;            // blocks per row, at least
  int threads;            // per block, at most
  int stages;             // rows in the ring of each team of threads, at least
  int prefetch_rows = 0;  // rows that a team prefetches into the L2 beyond its ring
  bool even = false;      // leave up to 1/32 of the blocks out if the rows then divide evenly
  bool pairs = false;     // two blocks, of a row each, add their sums before they write them
  int min_bytes = 0;      // in flight per block; stages are added to reach it
};

// Gradients of the above, for x the normalised tensor (residual_out where there is one) and grad
// that of out. grad_residual, where there is one, adds to grad_x, which is x's and residual's
// gradient. grad_weight and grad_bias [N], each or both null (that of an RMS norm is), have the
// parameters' dtypes; they need a workspace [2, norm_backward_parts(), N] float32, whose contents
// are undefined afterwards. The order of all sums is fixed.
struct NormBackward {
  NormKind kind = NormKind::kRms;
  const TensorView* x = nullptr;
  const TensorView* weight = nullptr;
  const TensorView* grad = nullptr;
  const TensorView* grad_residual = nullptr;
  const TensorView* grad_x = nullptr;
  const TensorView* grad_weight = nullptr;
  const TensorView* grad_bias = nullptr;
  const TensorView* workspace = nullptr;
  float eps = 0.0f;
  std::optional<NormBackwardConfig> config;  // none: tuned, measured, or by the heuristic
};

// The launch that a call comes to.
struct NormPlan {
  const char* kernel;  // "none" for an empty batch
  int vector_bytes;    // per access
  int threads_per_row;
  int cluster;  // blocks that share a row
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
  int stages;  // backward: rows in flight per team
  int ahead;   // forward: blocks per multiprocessor that prefetch their rows;
               // backward: rows that a team prefetches beyond its stages
  int parts;   // backward: partial sums of a weight
};

// The properties of a device that decide on a backward kernel; memory_gbps as memory_gbps()
// returns.
struct NormDevice {
  int multiprocessors = 0;
  int memory_gbps = 0;
  int index = -1;  // whose tuned configurations apply; -1: none
};

// Describes the tensor's device; zeros for a tensor that is not on a GPU.
Status norm_device(const TensorView& x, NormDevice* device);

// Checks and the choice of kernel, for a device of that kind; no GPU needed.
Status norm_forward_plan(const NormForward& call, int multiprocessors, NormPlan* plan);
Status norm_backward_plan(const NormBackward& call, const NormDevice& device, NormPlan* plan);

// Checks and chooses for the tensors' device, then launches on `stream` (a CUstream).
Status norm_forward(const NormForward& call, void* stream);
Status norm_backward(const NormBackward& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_H_
