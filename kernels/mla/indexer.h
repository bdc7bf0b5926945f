// SPDX-License-Identifier: Apache-2.0
// How much each key matters to each token, as sparse attention's indexer has it.
#ifndef KERNELS_MLA_INDEXER_H_
#define KERNELS_MLA_INDEXER_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct IndexerCall {
  const TensorView* q = nullptr;        // [T, H, 128] float8_e4m3fn, contiguous
  const TensorView* k = nullptr;        // [K, 128] float8_e4m3fn
  const TensorView* k_scale = nullptr;  // [K] float32, contiguous
  const TensorView* weights = nullptr;  // [T, H] float32
  const TensorView* starts = nullptr;   // [T] int32: the first key of each token; null: 0
  const TensorView* ends = nullptr;     // [T] int32: the key behind the last; null: K
  const TensorView* out = nullptr;      // [T, K] float32
};

struct IndexerPlan {
  const char* kernel;  // "none" for an empty output
  unsigned grid_x;     // blocks of tokens
  unsigned grid_y;     // parts of the keys
  unsigned block;
  int tiles;  // of 64 keys, of a part
  unsigned dynamic_smem;
};

// out[t, j] is the sum over heads of weights[t, h] * max(q[t, h] . k[j], 0), times k_scale[j];
// minus infinity outside of the token's keys.

// All checks and the choice of a launch for a device with that many multiprocessors; needs no GPU
// and no driver.
Status indexer_logits_plan(const IndexerCall& call, int multiprocessors, IndexerPlan* plan);

// Checks and chooses likewise, then launches on `stream` (a CUstream) of the tensors' device.
Status indexer_logits(const IndexerCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_MLA_INDEXER_H_
