// SPDX-License-Identifier: Apache-2.0
// A linear layer with its activation in one kernel.
#ifndef KERNELS_LINEAR_LINEAR_ACT_H_
#define KERNELS_LINEAR_LINEAR_ACT_H_

#include <optional>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"
#include "kernels/sm90/tuned.h"

namespace tiercel {

enum class Activation { kNone, kRelu, kSilu, kGelu, kGeluTanh };

// What a call would launch.
struct LinearActPlan {
  const char* kernel;  // "none" for an empty batch
  int tile_m;
  int tile_n;
  bool pingpong;  // two warpgroups take turns with tiles instead of sharing them
  int cluster;    // blocks; in a split-K kernel they share a tile, a slice of K each
  int splits;     // of K
  int group;      // rows of clusters that are worked on together
  int rows;       // of a split-K kernel's tile; 0 for the others
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
};

// A kernel by its tiles, and how to launch it: what a tuner varies.
struct LinearActConfig {
  int tile_m;
  int tile_n;
  bool pingpong;
  bool split_k;
  int splits;  // of a split-K kernel
  int group;   // of the others; 0: as many rows as stay in the L2
};

// y[M, N] = act(x[M, K] @ w[N, K]^T + bias[N]) + residual[M, N], float32 sums. All have one dtype,
// bfloat16 or float16; x and w are contiguous in their last dimension, and their rows may have any
// distance that is a multiple of 16 bytes; the others are contiguous. N and K are multiples of 8.
// `gated`: w is [2N, K], N rows of the gate, then N of what it multiplies, bias is [2N], and y is
// act(gate) * up; without residual and sums.
// x and w may be float8_e4m3fn with float32 scales, one of all or one a row; K is a multiple of 16
// then, y and bias are bfloat16, and there are neither gates nor residual nor sums. Or x_scale is
// [M, ceil(K / 128)] with any strides and w_scale [ceil(N / 128), ceil(K / 128)]; gates have only
// these, of 2N rows, and an N that is a multiple of 128.
struct LinearActCall {
  const TensorView* x = nullptr;
  const TensorView* w = nullptr;
  const TensorView* bias = nullptr;      // or null
  const TensorView* residual = nullptr;  // or null
  const TensorView* x_scale = nullptr;   // of float8 operands, else null
  const TensorView* w_scale = nullptr;
  const TensorView* y = nullptr;
  const TensorView* sums = nullptr;  // or null: what the activation is taken of, to be written too
  Activation activation = Activation::kNone;
  bool gated = false;
  // What to launch, or null: what was tuned for the nearest M, else what has the least expected
  // time.
  std::optional<LinearActConfig> config;  // none: chosen
};

// All checks and the choice of kernel for a device with that many multiprocessors; needs no GPU and
// no driver.
Status linear_act_plan(const LinearActCall& call, int multiprocessors, LinearActPlan* plan);

// The same for the tensors' device, then the launch on `stream` (a CUstream).
Status linear_act(const LinearActCall& call, void* stream);

// The products of the backward, with the same rules: of x, out[M, K] = grad[M, N] @ other[N, K],
// where other is w; of w, out[N, K] = grad[M, N]^T @ other[M, K], where other is x.
enum class LinearGradient { kX, kWeight };

struct LinearGradientCall {
  LinearGradient of = LinearGradient::kX;
  const TensorView* grad = nullptr;
  const TensorView* other = nullptr;
  const TensorView* out = nullptr;
};

Status linear_gradient_plan(const LinearGradientCall& call, int multiprocessors,
                            LinearActPlan* plan);
Status linear_gradient(const LinearGradientCall& call, void* stream);

// Of tuned configurations, for all activations alike.
TunedTable<LinearActConfig>& linear_act_tuned();

}  // namespace tiercel

#endif  // KERNELS_LINEAR_LINEAR_ACT_H_
