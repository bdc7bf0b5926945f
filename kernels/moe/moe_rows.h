// SPDX-License-Identifier: Apache-2.0
// A mixture of experts with gradients: what comes before, between and after its grouped products.
#ifndef KERNELS_MOE_MOE_ROWS_H_
#define KERNELS_MOE_MOE_ROWS_H_

#include "kernels/moe/moe_mlp.h"
#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// Each element of topk_ids [T, k], a token at one of its experts, has a row of matrices [T * k,
// ...] in the order of the experts. places [T, k] int32 has the elements' rows; a number that is no
// row stands for an element without an expert. Matrices are all bfloat16 or all float16, their
// columns multiples of 8, and contiguous except where strides are mentioned. Rows that no element
// has are neither read nor written.

// From moe_align_block_size with blocks of one slot: sorted_token_ids [T * k], expert_ids [T * k].
// Fills places, except for elements without an expert, and offsets [experts + 1] int32: where
// experts' rows begin.
struct MoePlacesCall {
  const TensorView* sorted_token_ids = nullptr;
  const TensorView* expert_ids = nullptr;
  const TensorView* places = nullptr;
  const TensorView* offsets = nullptr;
};
Status moe_places(const MoePlacesCall& call, void* stream);

// out[places[t, j]] = x[t]: x [T, H], whose rows may be at any distance of 16-byte vectors.
struct MoeSpreadCall {
  const TensorView* x = nullptr;
  const TensorView* places = nullptr;
  const TensorView* out = nullptr;
};
Status moe_spread(const MoeSpreadCall& call, void* stream);

// out[t] = the sum over j of weights[t, j] * x[places[t, j]], in float32, in order: out [T, H],
// weights [T, k] float32 or null for 1.
struct MoeCollectCall {
  const TensorView* x = nullptr;
  const TensorView* places = nullptr;
  const TensorView* weights = nullptr;
  const TensorView* out = nullptr;
};
Status moe_collect(const MoeCollectCall& call, void* stream);

// inner[row] = act(a, b), of pre [T * k, 2 * I] whose rows are a and then b.
struct MoeGateCall {
  const TensorView* pre = nullptr;
  const TensorView* places = nullptr;
  const TensorView* inner = nullptr;
  MoeActivation activation = MoeActivation::kSilu;
};
Status moe_gate(const MoeGateCall& call, void* stream);

// Its gradient, where inner is multiplied by the element's weight: from grad [T * k, I], the
// gradient of that product,
//   grad_pre[row] = weight * grad[row] * act'(a, b)
//   grad_weights[t, j] = grad[row] . act(a, b), 0 for an element without an expert
//   grad[row] = weight * act(a, b), in place: what the second matrices' gradient needs
struct MoeGateBackwardCall {
  const TensorView* grad = nullptr;
  const TensorView* pre = nullptr;
  const TensorView* places = nullptr;
  const TensorView* weights = nullptr;
  const TensorView* grad_pre = nullptr;
  const TensorView* grad_weights = nullptr;
  MoeActivation activation = MoeActivation::kSilu;
};
Status moe_gate_backward(const MoeGateBackwardCall& call, void* stream);

Status moe_rows_load(int device);

}  // namespace tiercel

#endif  // KERNELS_MOE_MOE_ROWS_H_
