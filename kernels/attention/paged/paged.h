// SPDX-License-Identifier: Apache-2.0
// Attention of any number of queries per sequence over a paged cache of keys and values.
#ifndef KERNELS_ATTENTION_PAGED_PAGED_H_
#define KERNELS_ATTENTION_PAGED_PAGED_H_

#include <vector>

#include "kernels/attention/common/options.h"
#include "kernels/attention/decode/decode.h"
#include "kernels/attention/paged/combine.h"
#include "kernels/attention/paged/kernels.h"
#include "kernels/attention/paged/mixed.h"
#include "kernels/attention/paged/wide.h"
#include "kernels/attention/paged/widen.h"

namespace tiercel {

// Sequence b has the rows of q and out from starts[b] to starts[b + 1], and `lengths[b]` keys, of
// which key j is at place j % page size of page table[b, j / page size]. Its last query stands at
// its last key. No contents are trusted: starts are cut to the rows of q, lengths to what the table
// has room for, and an entry that is no page counts as the last page. Rows of out that no sequence
// has are 0, and minus infinity in lse.
struct PagedAttentionCall {
  const TensorView* q = nullptr;           // [Tq, H, D] bfloat16, float16 or, as queries.h, float8
  const TensorView* k_cache = nullptr;     // [pages, page size, Hk, D] of q's dtype or float8
  const TensorView* v_cache = nullptr;     // the same, or of another head dimension Dv
  const TensorView* page_table = nullptr;  // [B, pages of a sequence] int32
  const TensorView* seqused_k = nullptr;   // [B] int32
  const TensorView* cu_seqlens_q = nullptr;  // [B + 1] int32
  const TensorView* sinks = nullptr;         // [H] float32, or null: a further score of each row
  const TensorView* tree = nullptr;          // [Tq] int64, or null: as DecodeRows has it
  const TensorView* prefix = nullptr;        // [B] int32: keys that all queries see, or null
  const TensorView* q_scale = nullptr;       // float32, 1 element, of float8 queries, or null: 1
  const TensorView* k_scale = nullptr;       // float32, 1 or Hk elements, float8 only, or null: 1
  const TensorView* v_scale = nullptr;       // the same
  const TensorView* out = nullptr;           // [Tq, H, Dv], as q, or bfloat16
  const TensorView* lse = nullptr;           // [H, Tq] float32, or null
  const TensorView* workspace = nullptr;     // float32, or null: the caller allocates it
  AttentionOptions options;
  int64_t max_q = 0;      // the most queries of a sequence
  int64_t max_keys = -1;  // of any sequence, if known: chooses how keys are split, nothing else

  // The larger head dimension: both are columns of the same tiles.
  int64_t widest() const { return q->shape[2] > out->shape[2] ? q->shape[2] : out->shape[2]; }
  bool one_head_dimension() const { return q->shape[2] == out->shape[2]; }
};

// The launches of a call; of its first heads, if it takes several turns.
struct PagedAttentionPlan {
  const char* kernel;   // "none" for an empty output
  const char* combine;  // a second kernel, or "none"
  const char* widen;    // one before them, or "none"
  const char* convert;  // that of float8 queries, or "none"
  const char* decode;   // the one that decoding sequences have, beside chunks, or "none"
  int tile_m;           // rows of a tile
  int tile_n;           // keys per step
  int queries;          // of a tile
  int copy_rows;        // keys of a copy
  int parts;            // of a tile's keys
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
  int64_t workspace;  // floats, of any initial value
};

// All checks and the choice of kernel for a device with that many multiprocessors; needs no GPU and
// no driver.
Status paged_attention_plan(const PagedAttentionCall& call, int multiprocessors,
                            PagedAttentionPlan* plan);

// A call that was checked and whose kernels were chosen.
class PagedAttentionLaunch {
 public:
  // For the tensors' device; launches nothing.
  Status prepare(const PagedAttentionCall& call);

  // Floats that `run` needs, of any value. Another launch may use the same ones after this one in
  // the stream.
  int64_t workspace() const;

  // On `stream`, a CUstream; `workspace` starts at a multiple of 16 bytes.
  Status run(float* workspace, void* stream);

 private:
  Status prepare_tiles(const PagedAttentionCall& call);
  Status widen(float* copies, void* stream);
  Status run_tiles(float* workspace, void* stream);
  Status divide(float* workspace, void* stream);
  int64_t partial_floats() const;

  const AttentionPagedKernel* kernel_ = nullptr;  // null for an empty output, and where others run
  const PagedWideKernel* wide_ = nullptr;         // for head dimensions above 256
  const PagedCombineKernel* combine_ = nullptr;   // null where keys are not split
  const PagedWidenKernel* widen_ = nullptr;       // null where the cache is read as it is
  bool decodes_ = false;
  PagedMixed mixed_;  // if it has `few`, decode_ takes the sequences that tiles do not
  PagedMixedArgs mixed_arguments_{};
  DecodeLaunch decode_;
  std::vector<PagedAttentionLaunch> slices_;  // of heads, one after the other; or none
  AttentionPagedArguments arguments_{};
  PagedWideArgs wide_arguments_{};
  PagedCombineArgs combined_{};
  PagedWidenArgs widen_arguments_{};
  int64_t partial_ = 0;  // floats
  unsigned blocks_ = 0;
  DType dtype_ = DType::kBFloat16;
  int device_ = 0;
};

// Checks a given workspace of at least `needed` floats.
Status paged_attention_check_workspace(const PagedAttentionCall& call, int64_t needed);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_PAGED_H_
