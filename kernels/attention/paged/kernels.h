// SPDX-License-Identifier: Apache-2.0
// The table of the kernels over a paged cache: functions.py declares them, paged.cc launches one.
#ifndef KERNELS_ATTENTION_PAGED_KERNELS_H_
#define KERNELS_ATTENTION_PAGED_KERNELS_H_

#include "kernels/attention/common/options.h"
#include "kernels/sm90/cubin_kernel.h"

namespace tiercel {

struct AttentionPagedVariant {
  DType dtype;
  int d;  // of the tiles; smaller head dimensions are filled up with zeros
  int tile_m;
  int tile_n;
  AttentionMask mask;
  bool capped;
  bool chained;  // a block has all parts of a tile: chained.py
  bool tree;     // rows see new tokens by their words: tree.py
  bool float8;   // takes float8 caches
};

// The kernel's parameters by name: Problem in problem.py and Paged in kernel.py.
struct AttentionPagedArguments {
  CUtensorMap q_map, k_map, v_map, o_map;
  void *lse, *starts_q, *lengths, *table, *sinks, *k_data, *v_data, *k_scale, *v_scale, *tree,
      *prefixes, *o;
  void *tile_starts, *copied, *k_copies, *v_copies, *states;
  int32_t batch, seq_q, seq_k, heads, kv_heads, scale, slope, left, right, band;
  int32_t total_q, step_q, length_step, table_step, table_row, row_step, head_step, columns;
  int32_t capacity, page_bits, page_rows, last_page, copy_rows, copies;
  int32_t group, queries, tiles, halvings, parts, mixed;
  int32_t loader, k_row, v_row, k_head, v_head, k_scale_step, v_scale_step;
  int32_t part_blocks, least_parts, tree_step, prefix_step;
  int32_t tile_step, tile_extra, tile_divisor, least_tiles;
};

using AttentionPagedKernel = CubinKernel<AttentionPagedVariant>;

// All kernels, as compiled.
const AttentionPagedKernel* attention_paged_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_KERNELS_H_
