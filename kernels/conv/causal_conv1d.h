// SPDX-License-Identifier: Apache-2.0
// Causal convolutions of 2 to 4 taps along sequences, a filter for each channel.
#ifndef KERNELS_CONV_CAUSAL_CONV1D_H_
#define KERNELS_CONV_CAUSAL_CONV1D_H_

#include <cstdint>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// The launch of a call.
struct ConvPlan {
  const char* kernel;  // "none" if there is nothing to do
  int64_t rows_per_thread;
  unsigned grid;
  unsigned block;
};

// x [..., T, D] float32, bfloat16 or float16: rows at one distance, on four
// channels; weight [D, W];
// bias [D] or null; out as x, rows at one distance. With cu_seqlens [B + 1] int32, x is [T, D] and
// its rows between two starts are a sequence; rows in no sequence give 0. All floats have x's
// dtype.
struct ConvCall {
  const TensorView* x = nullptr;
  const TensorView* weight = nullptr;
  const TensorView* bias = nullptr;        // or null
  const TensorView* cu_seqlens = nullptr;  // or null
  const TensorView* out = nullptr;
  bool silu = false;
};
Status causal_conv1d_plan(const ConvCall& call, ConvPlan* plan);
Status causal_conv1d(const ConvCall& call, void* stream);

// Sequences that go on: states [P, W - 1, D] hold the last inputs before a sequence, the newest one
// last, and are replaced by the last inputs of the sequence. x [B, T, D].
// state_indices [N] int32 or null for the sequence's own number; one that is no place
// in the pool stands for zeros that are not kept. Where has_state [N] bool is false, the sequence
// begins with zeros. A sequence without rows leaves its state.
struct ConvUpdateCall {
  ConvCall conv;
  const TensorView* states = nullptr;
  const TensorView* state_indices = nullptr;  // or null
  const TensorView* has_state = nullptr;      // or null
};
Status causal_conv1d_update_plan(const ConvUpdateCall& call, ConvPlan* plan);
Status causal_conv1d_update(const ConvUpdateCall& call, void* stream);

// The gradients of x, and of weight and bias in parts: sums [N, W + 1, D] float32 has for each of N
// parts of the rows the gradients of the taps, in the order of the weight's, and of the bias.
struct ConvBackwardCall {
  ConvCall conv;  // its `out` is the gradient of the result
  const TensorView* dx = nullptr;
  const TensorView* sums = nullptr;
};
Status causal_conv1d_backward_plan(const ConvBackwardCall& call, ConvPlan* plan);
Status causal_conv1d_backward(const ConvBackwardCall& call, void* stream);

// Loads all kernels on `device`.
Status causal_conv1d_load(int device);

}  // namespace tiercel

#endif  // KERNELS_CONV_CAUSAL_CONV1D_H_
