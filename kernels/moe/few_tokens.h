// SPDX-License-Identifier: Apache-2.0
// A whole expert MLP with float8 weights over few tokens, in one launch.
#ifndef KERNELS_MOE_FEW_TOKENS_H_
#define KERNELS_MOE_FEW_TOKENS_H_

#include "kernels/moe/moe_mlp.h"

namespace tiercel {

// The launch that a call would make.
struct FewTokensPlan {
  const char* kernel;  // "none" where nothing is to be done
  int slots;           // of weights in flight, per thread block
  int slot_bytes;
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
};

// x [T, H], w_up [E, 2 * I, H], w_down [E, H, I], topk_weights and topk_ids [T, k], out [T, H]:
//   out[t] = sum over j of topk_weights[t, j] * (act(x[t] @ w_up[e].T) @ w_down[e].T),
//   e = topk_ids[t, j], which adds nothing where it is no expert
// T * k is 1 to 32. bfloat16 x and out, float8_e4m3fn weights with float32 scales: [E, rows of w]
// or [E, 1], or both per 128x128 values, [E, rows / 128, columns / 128]. x and the rows between the
// halves are quantised as by fp8_quantize, with a scale per row or per 128 values.
// Rows of x are contiguous and begin at multiples of 16 bytes; an expert's rows follow each other
// without gaps, experts begin at multiples of 16 bytes; the other tensors are contiguous. H and I
// are multiples of 128. Problems that do not fit into a multiprocessor's shared memory are
// unimplemented: about H from 3328 and I from 1664 on.
struct FewTokensCall {
  const TensorView* x = nullptr;
  const TensorView* w_up = nullptr;
  const TensorView* w_down = nullptr;
  const TensorView* w_up_scale = nullptr;
  const TensorView* w_down_scale = nullptr;
  const TensorView* topk_weights = nullptr;
  const TensorView* topk_ids = nullptr;
  const TensorView* out = nullptr;
  MoeActivation activation = MoeActivation::kSilu;
};

// All checks and the layout for a device with that many multiprocessors. Needs no GPU and no
// driver.
Status fused_moe_few_tokens_plan(const FewTokensCall& call, int multiprocessors,
                                 FewTokensPlan* plan);

// Plans for the tensors' device and launches on `stream` (a CUstream). The thread blocks wait for
// each other: the launch starts when all multiprocessors have room.
Status fused_moe_few_tokens(const FewTokensCall& call, void* stream);

Status fused_moe_few_tokens_load(int device);

}  // namespace tiercel

#endif  // KERNELS_MOE_FEW_TOKENS_H_
