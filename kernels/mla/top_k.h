// SPDX-License-Identifier: Apache-2.0
// The places of the largest elements of each row.
#ifndef KERNELS_MLA_TOP_K_H_
#define KERNELS_MLA_TOP_K_H_

#include <cstdint>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct TopKCall {
  const TensorView* logits = nullptr;   // [T, N] float32, rows contiguous
  const TensorView* lengths = nullptr;  // [T] int32: elements of each row that count; null: all
  const TensorView* out = nullptr;      // [T, k] int32, contiguous
};

struct TopKPlan {
  const char* kernel;  // "none" for an empty output
  unsigned grid;
  unsigned block;
  unsigned cluster;  // blocks of a row
  unsigned dynamic_smem;
};

// The k largest of each row, ties by the lowest index, in ascending order of the indices, then -1.
// NaN is larger than any number; minus infinity is never selected.

// All checks and the choice of a launch for a device with that many multiprocessors; needs no GPU
// and no driver.
Status top_k_indices_plan(const TopKCall& call, int multiprocessors, TopKPlan* plan);

// Checks and chooses likewise, then launches on `stream` (a CUstream) of the tensors' device.
Status top_k_indices(const TopKCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_MLA_TOP_K_H_
