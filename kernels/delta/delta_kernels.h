// SPDX-License-Identifier: Apache-2.0
// The interface of the gated delta rule's host and device code: the kernels' arguments and tables.
#ifndef KERNELS_DELTA_DELTA_KERNELS_H_
#define KERNELS_DELTA_DELTA_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// A tensor [B, T, heads, D] of 16-bit floats; strides in bytes, the last dimension is contiguous.
struct DeltaHeads {
  char* data;
  int64_t batch;
  int64_t token;
  int64_t head;
};

inline constexpr float kDeltaNormEps = 1e-6f;  // added to the sum of a head's squares

struct DeltaDecodeArgs {
  DeltaHeads q, k, v, out;
  const float* g;    // [B, T, Hv] or [B, T, Hv, K]
  const char* beta;  // [B, T, Hv]
  char* states;
  int64_t slot_stride;  // bytes
  int64_t slots;
  const int* indices;  // [B, columns] or null
  int columns;
  const int* accepted;  // [B] or null
  int tokens;
  int k_heads;
  int v_heads;
  int value_size;
  float scale;
  bool l2norm;
  bool per_channel;
  bool float16;     // q, k, v, out; otherwise bfloat16
  bool beta_float;  // otherwise as q
};

struct DeltaDecodeKernel {
  DType state;
  int key_size;
  Kernel kernel;
};

inline constexpr int kDeltaDecodeThreads = 128;
inline constexpr int kDeltaDecodeColumns = 32;  // of a state, per block

const DeltaDecodeKernel* delta_decode_kernels(int* count);

// Prompts, in chunks. Tokens between two starts are a sequence, or `length` each. Chunk c of
// sequence b has the place begin / 64 + b + c in the workspace, which holds for each head of values
// two matrices [64, 64] of bfloat16 (the solved one, and the queries' with the keys) and a
// DeltaFactors.
struct DeltaRuleArgs {
  DeltaHeads q, k, v, out;
  const float* g;    // [tokens, Hv]
  const char* beta;  // [tokens, Hv]
  bool beta_float;
  const int* starts;   // [count + 1] or null
  int64_t start_step;  // elements
  int count;
  int64_t length;
  int64_t tokens;  // of all sequences
  char* matrices;
  float* factors;
  const float* initial_state;  // [count, Hv, K, V] or null
  float* final_state;          // likewise
  int k_heads;
  int v_heads;
  int value_size;
  float scale;
  bool l2norm;
};

struct DeltaRuleKernel {
  int key_size;
  Kernel kernel;
};

inline constexpr int kDeltaChunk = 64;
inline constexpr int kDeltaMatrixBytes = kDeltaChunk * kDeltaChunk * 2;
// Per token: what its row of K S, of Q S and its key are multiplied by; and the decay of the chunk.
inline constexpr int kDeltaFactors = 3 * kDeltaChunk + 4;
inline constexpr int kDeltaChunkThreads = 128;
inline constexpr int kDeltaWarpColumns = 16;  // of a state, per warp
inline constexpr int kDeltaMostWarps = 4;
inline constexpr int kDeltaLoaders = 128;  // threads of a block beside those warps

// Shared memory of a block, bytes.
constexpr int delta_chunks_smem(int key_size) {
  // q and k with rows of 16 bytes more, a matrix of float32, a half of one, and numbers of tokens.
  return 2 * kDeltaChunk * (2 * key_size + 16) + kDeltaChunk * (kDeltaChunk + 4) * 4 +
         kDeltaChunk / 2 * (kDeltaChunk / 2 + 4) * 4 + 5 * kDeltaChunk * 4;
}
constexpr int delta_rule_stage(int key_size, int warps) {
  return 2 * kDeltaChunk * (2 * key_size + 16) + 2 * kDeltaChunk * (2 * kDeltaChunk + 16) +
         kDeltaChunk * (2 * kDeltaWarpColumns * warps + 16) + kDeltaFactors * 4;
}
inline constexpr int kDeltaStages = 2;

const DeltaRuleKernel* delta_chunks_kernels(int* count);
const DeltaRuleKernel* delta_rule_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_DELTA_DELTA_KERNELS_H_
