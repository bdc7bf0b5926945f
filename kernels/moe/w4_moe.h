// SPDX-License-Identifier: Apache-2.0
// The two products of w4_moe: an expert MLP over routed tokens whose weights have 4 bits.
#ifndef KERNELS_MOE_W4_MOE_H_
#define KERNELS_MOE_W4_MOE_H_

#include "kernels/gemv/w4_format.h"
#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// Functions of the gate a and the value b; the last one has no gate.
enum class W4MoeActivation {
  kSilu,          // a * sigmoid(alpha * a) * b
  kSiluResidual,  // a * sigmoid(alpha * a) * (b + 1)
  kGelu,          // gelu(a) * b
  kRelu,          // relu(a) * b
  kReluSquared,   // relu(a)^2
};

// The launch that a call would make.
struct W4MoePlan {
  const char* kernel;  // "none" where nothing is to be done
  int tokens;          // of a block of the routing
  int rows;            // of the weight, a tile
  int blocks;          // an upper bound: only the device knows how many are in use
  int parts;           // of K, each a thread block of a cluster
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
};

// One product. The routing is the lists of moe_align_block_size, in blocks of 8, 16, 32 or 128 or,
// of bfloat16 and e2m1 weights or with x_scale, 64; without them each id is a block of its own.
struct W4MoeCall {
  W4Format format = W4Format::kMxfp4;
  const TensorView* x = nullptr;
  const TensorView* weight = nullptr;
  const TensorView* scale = nullptr;
  const TensorView* zero_point = nullptr;    // or null: 8
  const TensorView* global_scale = nullptr;  // or null: 1
  const TensorView* bias = nullptr;          // or null
  const TensorView* x_scale = nullptr;       // or null: x has 16 bits
  const TensorView* ids = nullptr;
  const TensorView* sorted_token_ids = nullptr;
  const TensorView* expert_ids = nullptr;
  const TensorView* num_tokens_post_padded = nullptr;
  const TensorView* out = nullptr;
  int64_t block_size = 0;      // of the lists
  int64_t global_experts = 0;  // that ids count
  W4MoeActivation activation = W4MoeActivation::kSilu;
  bool interleaved = false;
  float alpha = 1.0f;
  float limit = 0.0f;  // 0: none
};

// x [T, K] bfloat16 or, unless the format is MXFP4, float16; or, unless it is NVFP4, e4m3 with
// x_scale, float32, of one element or of one for each row, and bfloat16 for all that is otherwise
// of x's dtype; weight [E, N, K / 2], scale [E, N, K / group], zero_point likewise, global_scale
// [E], bias [E, N]: as those of w4_linear, one for each expert, all contiguous; ids [T, k] int32 or
// int64; K and N multiples of 64.
//
// `up`: out [T * k, I], N = 2 * I or, without a gate, I. Rows of the weight are those of the gates,
// then those that they are for; or both in turn if `interleaved`. Up to `limit`, gates are used
// as they are, and what they are for is from -limit to limit.
//   out[e] = act(x[e / k] @ w[expert].T + bias[expert])
// `down`: x [T * k, K], out [T * k, N]; zeros where there is no such expert. It has to be the
// launch behind the `up` of the same routing.
//   out[e] = x[e] @ w[expert].T + bias[expert]
// The lists and ids may hold anything: a value that is no element is padding, one that is no expert
// stands for none.
Status w4_moe_up_plan(const W4MoeCall& call, W4MoePlan* plan);
Status w4_moe_down_plan(const W4MoeCall& call, W4MoePlan* plan);

// Check likewise, then launch.
Status w4_moe_up(const W4MoeCall& call, void* stream);
Status w4_moe_down(const W4MoeCall& call, void* stream);

Status w4_moe_load(int device);

}  // namespace tiercel

#endif  // KERNELS_MOE_W4_MOE_H_
