// SPDX-License-Identifier: Apache-2.0
// The kernels of FP8 attention: those that functions.py declares, and the one that runs before
// them, attention_fp8_values.cu's.
#ifndef KERNELS_ATTENTION_FP8_KERNELS_H_
#define KERNELS_ATTENTION_FP8_KERNELS_H_

#include <cstdint>

#include "kernels/attention/common/options.h"
#include "kernels/sm90/cubin_kernel.h"
#include "kernels/sm90/launch.h"

namespace tiercel {

struct AttentionFp8Variant {
  int max_d;   // head dimensions up to this
  int tile_d;  // of the tiles: the rest is zeros
  int tile_m;
  int tile_n;
  int tile_columns;  // of a block of keys in a row of transposed values
  AttentionMask mask;
  bool capped;
  bool packed;
};

using AttentionFp8Kernel = CubinKernel<AttentionFp8Variant>;

const CubinKernel<AttentionFp8Variant>* attention_fp8_kernels(int* count);

inline constexpr int kAttentionFp8Keys = 128;  // per block of the kernel below
inline constexpr int kAttentionFp8Threads = 256;
inline constexpr int kAttentionFp8Group = 16;  // keys that are permuted among themselves

// Factors by entry and head of keys, strides in elements; a null pointer means 1 everywhere.
struct AttentionFp8Scale {
  const float* data;
  int64_t batch_stride, head_stride;
};

// Block (entry * heads + head) * blocks + i has the 128 keys i, and every 128 * blocks further on
// if the sequence is longer than announced.
struct AttentionFp8ValuesArgs {
  const char* v;  // [batch, keys, heads, d], strides in bytes
  int64_t batch_stride, key_stride, head_stride;
  // [batch, heads, d, row_bytes], or of packed sequences [heads, d, row_bytes], where sequence i
  // begins with tile starts[i] / tile_n + i: before that is room for all tiles of the others.
  char* transposed;
  int64_t row_bytes;
  const int* starts;  // null for sequences of one length; of any contents
  float* factors;     // [batch, heads, 2]: of scores, of values
  AttentionFp8Scale q_scale, k_scale, v_scale;
  int start_step;    // from one start to the next, in elements
  int keys;          // of a sequence; of packed ones, of all of them
  int tile_n;        // keys of a tile; after the last key zeros
  int tile_columns;  // its place in a row, of which the rest is not written
  int heads;
  int blocks;  // of a sequence
  int d;
};

const Kernel& attention_fp8_values_kernel();

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_FP8_KERNELS_H_
