// SPDX-License-Identifier: Apache-2.0
// A number added to every element.
#ifndef KERNELS_TOY_TOY_H_
#define KERNELS_TOY_TOY_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// x and out float32, contiguous, of one shape.
struct ToyShiftCall {
  const TensorView* x = nullptr;
  const TensorView* out = nullptr;
  double amount = 0.0;
};

struct ToyShiftPlan {
  const char* kernel;  // "none" for an empty output
  unsigned grid;
  unsigned block;
};

// All checks and the launch's shape; needs no GPU and no driver.
Status toy_shift_plan(const ToyShiftCall& call, ToyShiftPlan* plan);

// Checks and chooses likewise, then launches on `stream` (a CUstream) of the tensors' device.
Status toy_shift(const ToyShiftCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_TOY_TOY_H_
