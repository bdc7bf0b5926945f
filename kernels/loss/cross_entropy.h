// SPDX-License-Identifier: Apache-2.0
// The cross-entropy of rows of logits, and its gradient.
#ifndef KERNELS_LOSS_CROSS_ENTROPY_H_
#define KERNELS_LOSS_CROSS_ENTROPY_H_

#include <cstdint>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct CrossEntropyOptions {
  int64_t ignore_index = -100;
  float label_smoothing = 0.0f;
  float z_loss = 0.0f;   // the weight of lse^2
  float softcap = 0.0f;  // logits are softcap * tanh(logits / softcap); 0: they are as given
};

// The launch of a call.
struct CrossEntropyPlan {
  const char* kernel;  // "none" if there is nothing to do
  int blocks_per_row;
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;  // bytes
};

// logits [T, V] float32, bfloat16 or float16, contiguous rows; target [T] int32 or int64, any
// stride; weight [V] float32 contiguous or null; scale null, or float32 with 1 or T elements, which
// the row's loss and gradient are multiplied by; loss [T] float32 contiguous; grad [T, V] of the
// logits' dtype or null, contiguous rows, possibly the logits themselves.
//
// A row whose target is ignore_index has loss 0 * scale and gradient 0; with any other target
// outside of [0, V), both are NaN.
struct CrossEntropyCall {
  const TensorView* logits = nullptr;
  const TensorView* target = nullptr;
  const TensorView* weight = nullptr;  // or null
  const TensorView* scale = nullptr;   // or null
  const TensorView* loss = nullptr;
  const TensorView* grad = nullptr;  // or null
  CrossEntropyOptions options;
  // [T] float32 contiguous: the entropy of each row's distribution, 0 where the target is
  // ignore_index; or null. Not with label_smoothing.
  const TensorView* entropy = nullptr;
  // [T] float32 contiguous or null, with `entropy` and `grad`: the gradient of each row's entropy,
  // times its element here, is added to `grad`.
  const TensorView* entropy_scale = nullptr;
};

// All checks and the choice of a kernel; needs no GPU and no driver.
Status cross_entropy_plan(const CrossEntropyCall& call, CrossEntropyPlan* plan);

// Plans as cross_entropy_plan does, then launches on `stream`, a CUstream of the tensors' device.
Status cross_entropy(const CrossEntropyCall& call, void* stream);

// scale[0] = 1 / (the sum of the weights of the targets that are not ignored), by which a mean is
// scaled. weight null: each counts 1.
struct CrossEntropyScaleCall {
  const TensorView* target = nullptr;
  const TensorView* weight = nullptr;  // or null
  const TensorView* scale = nullptr;   // [1] float32
  int64_t ignore_index = -100;
};
Status cross_entropy_mean_scale_plan(const CrossEntropyScaleCall& call, CrossEntropyPlan* plan);
Status cross_entropy_mean_scale(const CrossEntropyScaleCall& call, void* stream);

// Multiplies the rows of grad [T, V] by factor, float32 with 1 or T elements, in place. Reads and
// writes nothing of rows whose factor is 1.
struct CrossEntropyRescaleCall {
  const TensorView* grad = nullptr;
  const TensorView* factor = nullptr;
};
Status cross_entropy_rescale(const CrossEntropyRescaleCall& call, void* stream);

// Loads all kernels on `device`.
Status cross_entropy_load(int device);

}  // namespace tiercel

#endif  // KERNELS_LOSS_CROSS_ENTROPY_H_
