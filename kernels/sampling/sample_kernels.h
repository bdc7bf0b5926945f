// SPDX-License-Identifier: Apache-2.0
// The interface of sampling's host and device code: the kernels' arguments and table.
#ifndef KERNELS_SAMPLING_SAMPLE_KERNELS_H_
#define KERNELS_SAMPLING_SAMPLE_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// A parameter with a value for each row, or with one for all.
template <typename T>
struct SampleParameter {
  const T* of_rows;  // or null
  T of_all;
};

struct SampleArgs {
  const char* logits;
  int64_t stride;  // bytes
  int64_t rows;
  int columns;
  int segments;            // of a row
  int segments_per_block;  // of the blocks that share a row
  uint32_t blocks;         // per row
  SampleParameter<float> temperature;
  SampleParameter<int> top_k;
  SampleParameter<float> top_p;
  SampleParameter<float> min_p;
  SampleParameter<int64_t> seed;
  SampleParameter<int64_t> offset;
  SampleParameter<float> repetition;
  SampleParameter<float> presence;
  SampleParameter<float> frequency;
  const int* counts;        // [T, V] of the tokens in the output, or null
  const uint32_t* prompt;   // [T, words] a bit for each token, or null
  const uint32_t* allowed;  // likewise
  int words;
  void* tokens;
  bool wide;        // tokens are int64, otherwise int32
  float* logprobs;  // or null
};

// The k tokens of each row with the largest logits; `wide` holds for them too.
struct TopLogprobsArgs : SampleArgs {
  int k;
  void* top_tokens;     // [T, k]
  float* top_logprobs;  // [T, k]
};

// The tokens that may be drawn from a row: one with distance d to the largest logit has the weight
// 2^(-d scale) unit, if d is up to the limit and both bounds.
struct Kept {
  float largest, scale, limit;
  float origin;  // of the fixed point of `fixed`
  uint32_t fixed, bits;
  uint64_t all;  // the sum of the weights; 0: greedy
  float unit;
};

// Rows of a sequence's positions, which share parameters; their offsets count up.
struct VerifyArgs : SampleArgs {
  int positions;
  Kept* kept;  // [T]
};

struct VerifyDraftArgs {
  const char* logits;
  int64_t stride;  // bytes
  int columns;
  int positions;       // the draft's and one more
  const Kept* kept;    // [B * positions]
  const int* drawn;    // likewise, tokens of the rows
  const void* draft;   // [B, positions - 1]
  const float* probs;  // [B, positions - 1, columns] or null
  SampleParameter<int64_t> seed;
  SampleParameter<int64_t> offset;
  void* tokens;  // [B, positions]
  int* accepted;
  bool wide;  // draft and tokens are int64, otherwise int32
};

// Nodes in place of a chain: node i has row i + 1 of the positions, behind row 0 of the root.
struct VerifyTreeArgs : VerifyDraftArgs {
  const int* parents;  // [B, positions - 1]; -1 for the root
  int* path;           // [B, positions - 1]
  DType dtype;         // of the logits
};

struct VerifyTreeKernel {
  Kernel kernel;
};

struct VerifyKernel {
  DType dtype;
  bool draws;  // the tokens of the rows; otherwise compares
  Kernel kernel;
};

struct SampleKernel {
  DType dtype;
  bool penalties;
  Kernel kernel;
};

// Rows without penalties and mask.
struct SampleStreamKernel {
  DType dtype;
  bool filters;
  unsigned threads;
  Kernel kernel;
};

struct TopLogprobsKernel {
  DType dtype;
  Kernel kernel;
};

inline constexpr int kSampleThreads = 256;  // per block
inline constexpr int kSampleBlocks = 8;     // at most, per row: the portable limit of clusters
// Columns that a warp reads at once and adds up in a fixed order, whatever the number of blocks.
inline constexpr int kSampleSegment = 1024;
inline constexpr int kSampleBins = 512;
inline constexpr int kSampleValues = 3 * kSampleBins;  // of 16-bit logits, at most
// A block's part of a row, bytes: two or three blocks per multiprocessor, or one for the longest
// rows.
inline constexpr int kSamplePart = 80 << 10;
inline constexpr int kSampleLargestSmem = 216 << 10;
// Copies that bring a block's part, at most: a segment for each warp at a time.
inline constexpr int kSampleRounds = 14;
// Bytes per segment beside its logits: its maximum and sum, and the mass of its kept tokens.
inline constexpr int kSampleTableBytes = 16;
inline constexpr int kSampleLogprobBytes = 8;  // and its sum at temperature 1

// Multiprocessors of an H100 or H200 that clusters of 4 or 8 large blocks can use.
inline constexpr int kClusteredMultiprocessors = 120;
inline constexpr int kStreamWarps = 16;
inline constexpr int kStreamRing = 128 << 10;     // bytes
inline constexpr int kStreamLeastSegments = 16;   // of a block that shares a row
inline constexpr int64_t kStreamLeast = 8 << 20;  // bytes of all rows
inline constexpr int kStreamTableBytes = 32;      // of a segment
// With filters: segments that each warp copies once more at a time, and what is streamed.
inline constexpr int kStagedSegments = 4;
inline constexpr int kStreamFilteredSegments = 144;  // at least
inline constexpr int kStreamTopK = 64;               // at most
inline constexpr int kStreamSegments = 512;          // at most, of a row

inline constexpr int kTopLogprobs = 32;  // at most, of a row
// Dynamic, at most: a pair of floats for each segment of the longest row.
inline constexpr int kTopLogprobsSmem = 8 << 10;

inline constexpr int kVerifyThreads = 512;
inline constexpr int kVerifySegments = 1024;  // at most, of a row
inline constexpr int kTreeNodes = 64;         // at most

const SampleKernel* sample_kernels(int* count);
const SampleStreamKernel* sample_stream_kernels(int* count);
const VerifyKernel* verify_kernels(int* count);
const VerifyTreeKernel* verify_tree_kernels(int* count);
const TopLogprobsKernel* top_logprobs_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_SAMPLING_SAMPLE_KERNELS_H_
