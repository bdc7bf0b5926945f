// SPDX-License-Identifier: Apache-2.0
// Draws a token from each row of logits.
#ifndef KERNELS_SAMPLING_SAMPLE_H_
#define KERNELS_SAMPLING_SAMPLE_H_

#include <cstdint>

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// The launch of a call.
struct SamplePlan {
  const char* kernel;  // "none" if there is nothing to do
  int blocks_per_row;
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;  // bytes
};

// The numbers apply to all rows where the tensor of the same name is null.
struct SampleNumbers {
  float temperature = 1.0f;
  int64_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  int64_t seed = 0;
  int64_t offset = 0;
  float repetition = 1.0f;
  float presence = 0.0f;
  float frequency = 0.0f;
};

// logits [T, V] float32, bfloat16 or float16, contiguous rows; tokens [T] int32 or int64; logprobs
// [T] float32 or null. Any content of the other tensors is valid. A row that holds NaN, or nothing
// but -inf, gets token -1 and the log-probability NaN. top_tokens [T, k] with the dtype of tokens
// and top_logprobs [T, k] float32, or both null: the k largest logits' after penalties and mask.
struct SampleCall {
  const TensorView* logits = nullptr;
  const TensorView* temperatures = nullptr;  // [T] float32, like all whose type is not given
  const TensorView* top_ks = nullptr;        // [T] int32; outside of [1, V) there is no limit
  const TensorView* top_ps = nullptr;
  const TensorView* min_ps = nullptr;
  const TensorView* seeds = nullptr;    // [T] int64; without it, rows differ by their place
  const TensorView* offsets = nullptr;  // [T] int64
  const TensorView* repetition_penalties = nullptr;
  const TensorView* presence_penalties = nullptr;
  const TensorView* frequency_penalties = nullptr;
  const TensorView* counts = nullptr;   // [T, V] int32
  const TensorView* prompt = nullptr;   // [T, ceil(V / 32)] int32: a bit for each token
  const TensorView* allowed = nullptr;  // likewise
  const TensorView* tokens = nullptr;
  const TensorView* logprobs = nullptr;
  const TensorView* top_tokens = nullptr;
  const TensorView* top_logprobs = nullptr;
  SampleNumbers numbers;
};

// Draft tokens against the logits of their positions and one more, B * (S + 1) rows. `logits` and
// the parameters are those of sample(), with B for T. draft [B, S] int32 or int64; probs [B, S, V]
// float32 or null for a draft without chance; tokens [B, S + 1], accepted [B] int32; workspace
// int64 [verify_draft_workspace()]. With parents [B, S] and path [B, S], both int32, the draft is a
// tree of up to 64 nodes: a node's parent is an earlier node or -1, the root, and others are never
// reached. path gets the accepted nodes, and -1 behind them.
struct VerifyDraftCall {
  SampleCall sample;
  const TensorView* draft = nullptr;
  const TensorView* probs = nullptr;
  const TensorView* tokens = nullptr;
  const TensorView* accepted = nullptr;
  const TensorView* workspace = nullptr;
  const TensorView* parents = nullptr;
  const TensorView* path = nullptr;
};

int64_t verify_draft_workspace(int64_t rows);
Status verify_draft_plan(const VerifyDraftCall& call, SamplePlan* plan);
Status verify_draft(const VerifyDraftCall& call, void* stream);
Status verify_draft_load(int device);

// All checks and the choice of a kernel; needs no GPU and no driver.
Status sample_plan(const SampleCall& call, SamplePlan* plan);

// Plans as sample_plan does, then launches on `stream`, a CUstream of the tensors' device.
Status sample(const SampleCall& call, void* stream);

// Loads all kernels on `device`.
Status sample_load(int device);

}  // namespace tiercel

#endif  // KERNELS_SAMPLING_SAMPLE_H_
