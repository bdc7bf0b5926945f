// SPDX-License-Identifier: Apache-2.0
// A linear layer with NVFP4 weights for a few tokens.
#ifndef KERNELS_GEMV_NVFP4_LINEAR_H_
#define KERNELS_GEMV_NVFP4_LINEAR_H_

#include <optional>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"
#include "kernels/sm90/tuned.h"

namespace tiercel {

// What a call would launch.
struct Nvfp4LinearPlan {
  const char* kernel;  // "none" for an empty batch
  int cluster;         // blocks that share rows of the weight, along K
  int parts;           // warps of a block that do
  int passes;          // these need for all of K
  int rows;            // of a block, one turn after another
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
};

// A way to cut the work up: what a tuner varies.
struct Nvfp4LinearConfig {
  int cluster;  // a power of two
  int tiles;    // of 16 rows, a block at a time
  int parts;
  int stages;  // of a warp: 2
};

struct Nvfp4LinearCall {
  const TensorView* x = nullptr;
  const TensorView* weight = nullptr;
  const TensorView* scale = nullptr;
  const TensorView* global_scale = nullptr;  // or null
  const TensorView* out = nullptr;
  std::optional<Nvfp4LinearConfig> config;  // none: chosen
};

// x [T, K] bfloat16, T up to 16, rows at multiples of 16 bytes; weight [N, K / 2] pairs of e2m1;
// scale [N, K / 16] e4m3; global_scale float32 with one element, or null for 1; out [T, N]
// bfloat16, contiguous.
//   out = global * (x @ (weight * scale).T)
// `config` is what to launch, or null: what was tuned for the nearest number of tokens, else what
// has the least expected time.

// All checks and the choice of configuration; needs no GPU and no driver.
Status nvfp4_linear_plan(const Nvfp4LinearCall& call, Nvfp4LinearPlan* plan);

// The same, then the launch.
Status nvfp4_linear(const Nvfp4LinearCall& call, void* stream);

Status nvfp4_linear_load(int device);

// Of tuned configurations; a problem's dtype is the weight's.
TunedTable<Nvfp4LinearConfig>& nvfp4_linear_tuned();

}  // namespace tiercel

#endif  // KERNELS_GEMV_NVFP4_LINEAR_H_
