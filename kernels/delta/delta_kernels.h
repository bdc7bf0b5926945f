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
  int sequences;
};

struct DeltaDecodeKernel {
  DType state;
  int key_size;
  bool stream;  // blocks that stay, for a token of each sequence
  Kernel kernel;
};

inline constexpr int kDeltaDecodeThreads = 128;
inline constexpr int kDeltaDecodeColumns = 32;  // of a state, per block
inline constexpr int kDeltaStreamSize = 128;    // of keys and of values
// A slice of the columns has kDeltaDecodeThreads; one more warp loads, and one stores.
inline constexpr int kDeltaStreamThreads =
    kDeltaStreamSize / kDeltaDecodeColumns * kDeltaDecodeThreads + 64;
constexpr int delta_stream_stages(int bytes) { return bytes == 4 ? 3 : 6; }
constexpr int delta_stream_smem(int bytes) {
  // Whole states and their tokens, sums of each slice, twice, and barriers.
  return delta_stream_stages(bytes) *
             (kDeltaStreamSize * (kDeltaStreamSize * bytes + 3 * 2 + 4) + 32) +
         kDeltaStreamSize / kDeltaDecodeColumns * 2 * 4 * 4 * (2 * kDeltaDecodeColumns + 4) + 256;
}

const DeltaDecodeKernel* delta_decode_kernels(int* count);

// Prompts, in chunks. Tokens between two starts are a sequence, or `length` each. Chunk c of
// sequence b has the place begin / 64 + b + c in the workspace, which holds for each head of values
// two matrices [64, 64] of 16-bit elements (the solved one, and the queries' with the keys) and
// kDeltaFactors numbers; with a gate per channel also three tiles [64, K]: keys and queries that
// multiply the state, and keys that are added to it.
//
// Few long sequences are divided into segments of `segment_chunks` chunks; 0: each is one. Segment
// s of sequence b has the slot (place of its first chunk) / segment_chunks + b + s.
struct DeltaRuleArgs {
  DeltaHeads q, k, v, out;
  const float* g;    // [tokens, Hv] or [tokens, Hv, K]
  const char* beta;  // [tokens, Hv]
  bool beta_float;
  const int* starts;   // [count + 1] or null
  int64_t start_step;  // elements
  int count;
  int64_t length;
  int64_t tokens;  // of all sequences
  int64_t segment_chunks;
  int64_t places;  // of the workspace
  // [Hk, places] or null: 1 for chunks that the first kernel has prepared. If given, its blocks
  // stay and the last kernel runs beside it, waiting for each chunk.
  int* ready;
  char* matrices;
  float* factors;
  char* tiles;
  float* transitions;  // [slots, Hv, K, V + K]: what a segment adds, and what it multiplies by
  // [slots, Hv] or null: 1 for segments that leave nothing of a state and lack the latter.
  int* lost;
  float* segment_states;       // [slots, Hv, K, V]: what segments begin with
  const float* initial_state;  // [count, Hv, K, V] or null
  float* final_state;          // likewise
  int k_heads;
  int v_heads;
  int value_size;
  float scale;
  bool l2norm;
  char* products;  // for gradients with a gate per channel: the keys' with each other, a matrix
};

// Gradients. The workspace has the matrices, of which the first is the inverse of I + A without the
// betas, and kDeltaBackFactors numbers; with a gate per channel the tiles and the keys' products;
// and of each chunk and head, of 16-bit elements: the states before it and their gradients after
// it, transposed [V, K]; and [64, V]: the values less what the keys find, what tokens write, and
// the gradient of the former times the betas. With segments it has `transitions` and
// `segment_states` as the forward has, and the gradients of the states that segments begin with.
struct DeltaBackArgs : DeltaRuleArgs {
  DeltaHeads grad;          // of the results
  const float* grad_final;  // of the final states, [count, Hv, K, V], or null
  DeltaHeads dq, dk, dv;    // contiguous
  float* dg;                // as g
  char* dbeta;              // likewise, as beta
  float* grad_initial;      // [count, Hv, K, V] or null
  char* states;
  char* grad_states;
  char* rest;
  char* written;
  char* grad_rest;
  float* segment_grads;  // [slots, Hv, K, V]: first what a segment adds to the gradient, alone
  bool transition;       // the passes make `transitions` and these terms, and nothing else
};

// The kernels of a call, in this order; and those of its gradients.
enum class DeltaPart {
  kChunks,
  kStayingChunks,
  kTransitions,
  kScan,
  kRule,
  kBackChunks,
  kBackPasses,
  kBackScan,
  kGradients
};

struct DeltaRuleKernel {
  DeltaPart part;
  int key_size;  // 0: any, as are the dtype and the gates
  DType dtype;
  bool channels;
  Kernel kernel;
};

inline constexpr int kDeltaChunk = 64;
inline constexpr int kDeltaMatrixBytes = kDeltaChunk * kDeltaChunk * 2;
// Per token: what its row of K S, of Q S and its key are multiplied by; and the decay of the chunk,
// twice, and the logarithms, base 2, of what half of its tokens leave of a state at most, each that
// of all tokens or 0. With a gate per channel: the chunk's decay of each. For gradients also each
// token's beta.
inline constexpr int kDeltaFactors = 3 * kDeltaChunk + 4;
inline constexpr int kDeltaBackFactors = kDeltaFactors + kDeltaChunk;
inline constexpr int kDeltaChunkThreads = 128;
inline constexpr int kDeltaChunkBlocks = 4;       // with a chunk each, of a multiprocessor
inline constexpr int kDeltaChunkTeams = 3;        // of so many threads, of a block that stays
inline constexpr int kDeltaChannelThreads = 256;  // of a block with a gate per channel
inline constexpr int kDeltaSlice = 64;            // columns of a state, per warpgroup
inline constexpr int kDeltaGroups = 2;            // warpgroups of a block that multiply, at most
inline constexpr int kDeltaLoaders = 128;         // threads of a block beside those
inline constexpr int kDeltaScanThreads = 256;
inline constexpr int kDeltaScanColumns = 8;  // of a state, per block
inline constexpr int kDeltaScanSize = 128;   // of keys; segments are for these only
inline constexpr int kDeltaScanPitch = kDeltaScanSize + 4;
inline constexpr int kDeltaScanSmem =
    2 * kDeltaScanSize * (kDeltaScanColumns + kDeltaScanPitch) * 4;

// Shared memory of a block, bytes.
constexpr int delta_chunks_smem(int key_size, bool stays) {
  // q and k with rows of 16 bytes more, a matrix of float32, which overwrites them in blocks that
  // have one chunk, a half of one, and numbers of tokens.
  return 2 * kDeltaChunk * (2 * key_size + 16) + (stays ? kDeltaChunk * (kDeltaChunk + 4) * 4 : 0) +
         kDeltaChunk / 2 * (kDeltaChunk / 2 + 4) * 4 + 5 * kDeltaChunk * 4;
}
// The sums of the gates, one and a half tiles of keys, or a matrix and half of one: the largest.
constexpr int delta_channels_rest(int key_size) {
  const int sums = kDeltaChunk * (key_size + 4) * 4;
  const int tiles = kDeltaChunk * 3 / 2 * (2 * key_size + 16);
  const int matrices =
      kDeltaChunk * (kDeltaChunk + 4) * 4 + kDeltaChunk / 2 * (kDeltaChunk / 2 + 4) * 4;
  return sums > tiles ? (sums > matrices ? sums : matrices) : tiles > matrices ? tiles : matrices;
}
constexpr int delta_channels_smem(int key_size) {
  // q and k, and numbers of tokens, and of four of the channels' gates for each thread.
  return 2 * kDeltaChunk * (2 * key_size + 16) + delta_channels_rest(key_size) +
         (3 * kDeltaChunk + 4 * kDeltaChannelThreads) * 4;
}
constexpr int delta_rule_stages(bool channels, int groups) {
  return channels && groups > 1 ? 2 : 3;
}
constexpr int delta_rule_stage(int key_size, bool channels, int groups) {
  // Tiles of keys and queries, both matrices, factors, and a tile of values for each group.
  return (channels ? 3 : 2) * kDeltaChunk * 2 * key_size + 2 * kDeltaMatrixBytes + 1024 +
         groups * kDeltaChunk * kDeltaSlice * 2;
}
constexpr int delta_rule_smem(int key_size, bool channels, int groups) {
  return delta_rule_stages(channels, groups) * (delta_rule_stage(key_size, channels, groups) + 16);
}
constexpr int delta_rule_most_smem(int key_size, bool channels) {
  const int one = delta_rule_smem(key_size, channels, 1);
  const int two = delta_rule_smem(key_size, channels, kDeltaGroups);
  return one > two ? one : two;
}

// A stage of the passes for gradients has tiles of keys and queries, both matrices, and factors.
inline constexpr int kDeltaBackFactorBytes = 2048;
constexpr int delta_back_stages(bool channels) { return channels ? 2 : 3; }
constexpr int delta_back_stage(int key_size, bool channels, int groups) {
  return (channels ? 3 : 2) * kDeltaChunk * 2 * key_size + 2 * kDeltaMatrixBytes +
         kDeltaBackFactorBytes + groups * kDeltaChunk * kDeltaSlice * 2;
}
constexpr int delta_back_smem(int key_size, bool channels, int groups) {
  return delta_back_stages(channels) * (delta_back_stage(key_size, channels, groups) + 16);
}

inline constexpr int kDeltaGradientThreads = 256;
inline constexpr int kDeltaGradientNumbers = 16 * kDeltaChunk;  // floats
inline constexpr int kDeltaChannelNumbers = 28 * kDeltaChunk;
constexpr int delta_gradients_smem(int key_size) {
  // q and k; twice, of 64 columns of v, three tiles of tokens and two of states; two matrices; all
  // with rows of 16 bytes more.
  const int keys = kDeltaChunk * (2 * key_size + 16), values = kDeltaChunk * (2 * kDeltaSlice + 16);
  return 2 * keys + 2 * (3 * values + 2 * keys) + 2 * values + kDeltaGradientNumbers * 4;
}
constexpr int delta_channel_gradients_smem(int key_size) {
  // One stage, and matrices [64, K] of float32: the sums of the gates, and two more.
  const int keys = kDeltaChunk * (2 * key_size + 16), values = kDeltaChunk * (2 * kDeltaSlice + 16);
  return 2 * keys + 3 * values + 2 * keys + 2 * values + kDeltaChunk * (3 * key_size + 20) * 4 +
         kDeltaChannelNumbers * 4;
}

const DeltaRuleKernel* delta_chunks_kernels(int* count);
const DeltaRuleKernel* delta_channels_kernels(int* count);
const DeltaRuleKernel* delta_rule_kernels(int* count);
const DeltaRuleKernel* delta_back_kernels(int* count);
const DeltaRuleKernel* delta_gradients_kernels(int* count);
const DeltaRuleKernel* delta_channel_gradients_kernels(int* count);

// The gated norm of the output.
struct GatedNormArgs {
  const char* x;
  const char* gate;
  const char* weight;  // float32, or as x
  char* out;
  int64_t x_stride;  // bytes
  int64_t gate_stride;
  int64_t rows;
  int columns;
  int lanes;  // of a row, a power of two
  bool weight_float;
  float eps;
};

struct GatedNormKernel {
  DType dtype;
  int vectors;  // of 8 elements, of a lane
  Kernel kernel;
};

inline constexpr int kGatedNormThreads = 256;
inline constexpr int kGatedNormVectors = 4;
inline constexpr int64_t kGatedNormMost = 32 * 8 * kGatedNormVectors;  // columns

const GatedNormKernel* gated_norm_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_DELTA_DELTA_KERNELS_H_
