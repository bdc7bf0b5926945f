// SPDX-License-Identifier: Apache-2.0
// Adds to the rows of a weight's gradient what tokens give to their own targets.
#ifndef KERNELS_LOSS_TARGET_ROWS_H_
#define KERNELS_LOSS_TARGET_ROWS_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// sums[target[i]] += by[order[i]] * x[order[i]] for all i, in float32, with one rounding for each
// row. sums [V, H] and x [T, H] are bfloat16 or float16 with contiguous rows; target [T] int32
// ascending; order [T] int64: a permutation; by [T] float32; all three contiguous. Targets beyond
// sums are left out, and an order beyond x is cut off.
struct TargetRowsCall {
  const TensorView* sums = nullptr;
  const TensorView* x = nullptr;
  const TensorView* target = nullptr;
  const TensorView* order = nullptr;
  const TensorView* by = nullptr;
};

// The launch of a call.
struct TargetRowsPlan {
  const char* kernel;  // "none" if there is nothing to add
  unsigned grid;       // tokens
  unsigned parts;      // blocks that share a row
  unsigned block;
};

// All checks and the launch; needs no GPU and no driver.
Status target_rows_plan(const TargetRowsCall& call, TargetRowsPlan* plan);

// Also launches, on `stream` (a CUstream of the tensors' device).
Status target_rows(const TargetRowsCall& call, void* stream);

// Loads all kernels on `device`.
Status target_rows_load(int device);

}  // namespace tiercel

#endif  // KERNELS_LOSS_TARGET_ROWS_H_
