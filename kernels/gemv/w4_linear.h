// SPDX-License-Identifier: Apache-2.0
// A linear layer with 4-bit weights: w4_linear, and nvfp4_linear as one format of it.
#ifndef KERNELS_GEMV_W4_LINEAR_H_
#define KERNELS_GEMV_W4_LINEAR_H_

#include <optional>

#include "kernels/gemv/w4_format.h"
#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"
#include "kernels/sm90/tuned.h"

namespace tiercel {

// What a call would launch.
struct W4LinearPlan {
  const char* kernel;  // "none" for an empty batch
  int cluster;         // blocks that share rows of the weight, along K
  int parts;           // warps of a block that do
  int passes;          // these need for all of K
  int rows;            // of a block, one turn after another
  int tokens;          // of a block
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
  int tail = 0;          // tiles of a second launch, whose
  int tail_cluster = 0;  // blocks split K of each
};

// A way to cut up the work for up to 16 tokens: what a tuner varies.
struct Nvfp4LinearConfig {
  int cluster;  // a power of two
  int tiles;    // of 16 rows, a block at a time
  int parts;
  int stages;  // of a warp: 2
};

// A way to cut it up for more: one of the kernels, and the blocks that split K.
struct W4TilesConfig {
  int tokens;
  int rows;
  int cluster;
  int tail_cluster;  // of the tiles behind the last whole wave, or 0: they are as the others
};

struct W4LinearCall {
  const char* op = "w4_linear";
  W4Format format = W4Format::kNvfp4;
  W4Activation activation = W4Activation::kNone;
  const TensorView* x = nullptr;
  const TensorView* weight = nullptr;
  const TensorView* scale = nullptr;
  const TensorView* zero_point = nullptr;    // or null: 8
  const TensorView* global_scale = nullptr;  // or null: 1
  const TensorView* bias = nullptr;          // or null
  const TensorView* x_scale = nullptr;       // of x of e4m3
  const TensorView* out = nullptr;
  std::optional<Nvfp4LinearConfig> config;  // none of both: chosen
  std::optional<W4TilesConfig> tiles;
};

// x [T, K] bfloat16 or, unless the format is MXFP4, float16, rows at multiples of 16 bytes; weight
// [N, K / 2] pairs of 4 bits, the first in the low half, e2m1 or 0 to 15; scale [N, K / 16] e4m3
// (NVFP4), [N, K / 32] exponents as uint8 (MXFP4) or [N, K / 32, 64 or 128] of x's dtype (int4);
// zero_point, of int4, has the scale's shape and dtype; global_scale float32 with one element; bias
// [N] of x's dtype; out [T, N] of x's dtype, contiguous.
//   out = act(global * (x @ ((weight - zero_point) * scale).T) + bias)
// With x_scale, float32 with 1 or T elements, x is e4m3 times it, the format MXFP4 or int4, bias
// and out are bfloat16, and int4's scale is bfloat16 or float16.

// All checks and the choice of configuration; needs no GPU and no driver.
Status w4_linear_plan(const W4LinearCall& call, W4LinearPlan* plan);

// The same, then the launch.
Status w4_linear(const W4LinearCall& call, void* stream);

Status w4_linear_load(W4Format format, int device);
Status nvfp4_linear_load(int device);

// Of tuned configurations of NVFP4; a problem's dtype is the weight's.
TunedTable<Nvfp4LinearConfig>& nvfp4_linear_tuned();

}  // namespace tiercel

#endif  // KERNELS_GEMV_W4_LINEAR_H_
