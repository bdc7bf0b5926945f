// SPDX-License-Identifier: Apache-2.0
// Attention of any number of queries per sequence over a paged cache of keys and values.
#ifndef KERNELS_ATTENTION_PAGED_PAGED_H_
#define KERNELS_ATTENTION_PAGED_PAGED_H_

#include "kernels/attention/common/options.h"

namespace tiercel {

// Sequence b has the rows of q and out from starts[b] to starts[b + 1], and `lengths[b]` keys, of
// which key j is at place j % page size of page table[b, j / page size]. Its last query stands at
// its last key. No contents are trusted: starts are cut to the rows of q, lengths to what the table
// has room for, and an entry that is no page counts as the last page. Rows of out that no sequence
// has are 0, and minus infinity in lse.
struct PagedAttentionCall {
  const TensorView* q = nullptr;             // [Tq, H, D] bfloat16 or float16
  const TensorView* k_cache = nullptr;       // [pages, page size, Hk, D] of q's dtype
  const TensorView* v_cache = nullptr;       // the same
  const TensorView* page_table = nullptr;    // [B, pages of a sequence] int32
  const TensorView* seqused_k = nullptr;     // [B] int32
  const TensorView* cu_seqlens_q = nullptr;  // [B + 1] int32
  const TensorView* sinks = nullptr;         // [H] float32, or null: a further score of each row
  const TensorView* out = nullptr;           // as q
  const TensorView* lse = nullptr;           // [H, Tq] float32, or null
  AttentionOptions options;
};

// The launch of a call.
struct PagedAttentionPlan {
  const char* kernel;  // "none" for an empty output
  int tile_m;          // rows of a tile
  int tile_n;          // keys per step
  int queries;         // of a tile
  int copy_rows;       // keys of a copy
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
};

// All checks and the choice of kernel for a device with that many multiprocessors; needs no GPU and
// no driver.
Status paged_attention_plan(const PagedAttentionCall& call, int multiprocessors,
                            PagedAttentionPlan* plan);

// Checks and chooses for the tensors' device, then launches on `stream` (a CUstream).
Status paged_attention(const PagedAttentionCall& call, void* stream);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_PAGED_H_
