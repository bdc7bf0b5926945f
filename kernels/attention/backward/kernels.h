// SPDX-License-Identifier: Apache-2.0
// The backward's kernels: those that functions.py declares, and the ones that run before and after
// them, attention_backward_rows.cu's.
#ifndef KERNELS_ATTENTION_BACKWARD_KERNELS_H_
#define KERNELS_ATTENTION_BACKWARD_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/cubin_kernel.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct AttentionBackwardVariant {
  DType dtype;
  int max_d;   // head dimensions up to this
  int tile_d;  // of the tiles: the rest is zeros
  int tile_m;
  bool capped;
};

using AttentionBackwardKernel = CubinKernel<AttentionBackwardVariant>;

const CubinKernel<AttentionBackwardVariant>* attention_backward_kernels(int* count);

inline constexpr int kAttentionBackwardThreads = 256;  // of a block before or after it
inline constexpr int kAttentionBackwardKeys = 128;     // of a tile

// [batch, rows, heads, columns], strides in elements.
struct AttentionRows {
  char* data;
  int64_t batch_stride, row_stride, head_stride;
};

// Block (entry * heads + head) * blocks + i has tile_m queries. Of the workspace it has: the
// logarithms of its rows' sums, to the base 2, then their deltas; dq as it lies in the middle
// kernel's registers; one turn.
struct AttentionBackwardRowsArgs {
  AttentionRows out;
  AttentionRows grad;
  AttentionRows dq;
  const float* lse;
  const float* grad_lse;  // or null
  float* stats;
  float* sums;       // of dq
  int32_t* turns;    // or null
  int32_t* counter;  // of tiles taken
  int64_t rows;      // of a sequence
  int heads;
  int blocks;  // of a sequence
  int d;
  float scale;
};

struct AttentionBackwardRowsKernel {
  DType dtype;
  int tile_d;
  int tile_m;
  Kernel prepare;
  Kernel finish;
};

const AttentionBackwardRowsKernel* attention_backward_rows_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_BACKWARD_KERNELS_H_
