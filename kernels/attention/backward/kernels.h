// SPDX-License-Identifier: Apache-2.0
// The backward's kernels: those that functions.py declares, and the ones that run before and after
// them, attention_backward_rows.cu's and attention_backward_sequences.cu's.
#ifndef KERNELS_ATTENTION_BACKWARD_KERNELS_H_
#define KERNELS_ATTENTION_BACKWARD_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/cubin_kernel.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct AttentionBackwardVariant {
  DType dtype;
  int max_d;  // head dimensions of q and k up to this
  int max_d_v;
  int tile_d;  // of the tiles: the rest is zeros
  int tile_d_v;
  int tile_m;
  int tile_n;
  bool plain;   // without softcap
  bool capped;  // with it
  bool dense;   // sequences of one length
  bool packed;  // takes maps and lists of packed sequences; without a list if dense
};

using AttentionBackwardKernel = CubinKernel<AttentionBackwardVariant>;

const CubinKernel<AttentionBackwardVariant>* attention_backward_kernels(int* count);

inline constexpr int kAttentionBackwardThreads = 256;  // of a block before or after it

// Packed sequences are those of cu_seqlens, and two more: the rows before the first start and those
// after the last one, of q and of k, which do not see each other. So each row is in one sequence.
// All heads share the lists of tiles and of blocks; their numbers are inside of the tensors.

// Up to tile_n keys of a sequence, for Tile in sequences.py.
struct alignas(16) AttentionBackwardTile {
  int32_t column;  // of the sequence's tiles
  int32_t seq_k;
  int32_t seq_q;        // 0 for rows of no sequence
  int32_t k_end;        // the row of k after the sequence's last one
  int32_t first_block;  // of the sequence's queries
  int32_t q_end;
  int32_t unused[2];
};

// Up to tile_m queries of a sequence.
struct AttentionBackwardBlock {
  int32_t row;
  int32_t end;  // of the sequence; no more than `row` if there is no such block
};

struct AttentionBackwardSequencesArgs {
  const int32_t* starts_q;
  const int32_t* starts_k;
  int64_t step_q;  // from one of the starts to the next
  int64_t step_k;
  int32_t batch;
  int32_t rows_q;
  int32_t rows_k;
  int32_t tile_m;
  int32_t tile_n;
  bool descending;  // a sequence's late keys come first
  int32_t room;     // blocks that the list has
  AttentionBackwardTile* tiles;
  AttentionBackwardBlock* blocks;
  int32_t* tile_count;
};

// Writes the lists, in one block of threads.
const Kernel& attention_backward_sequences_kernel();

inline constexpr int kAttentionBackwardSequencesThreads = 1024;

// [batch, rows, heads, columns], strides in elements.
struct AttentionRows {
  char* data;
  int64_t batch_stride, row_stride, head_stride;
};

// Block (entry * heads + head) * blocks + i has tile_m queries. Of the workspace it has: the
// logarithms of its rows' sums, to the base 2, then their deltas; dq as it lies in the middle
// kernel's registers; one turn. Packed sequences are one entry, whose block i the list describes.
struct AttentionBackwardRowsArgs {
  AttentionRows out;
  AttentionRows grad;
  AttentionRows dq;
  const float* lse;
  const float* grad_lse;  // or null
  float* stats;
  float* sums;                         // of dq
  int32_t* turns;                      // or null
  int32_t* counter;                    // of tiles taken
  const AttentionBackwardBlock* list;  // null unless packed
  int64_t rows;                        // of an entry
  int heads;
  int blocks;  // of a head
  int d;
  int d_v;
  int tile_d;
  float scale;
};

struct AttentionBackwardRowsKernel {
  DType dtype;
  int tile_d;
  int tile_d_v;
  int tile_m;
  int columns;  // of dq that a block of `finish` takes
  Kernel prepare;
  Kernel finish;
};

const AttentionBackwardRowsKernel* attention_backward_rows_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_BACKWARD_KERNELS_H_
