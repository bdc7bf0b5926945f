// SPDX-License-Identifier: Apache-2.0
// Attention of a few queries per sequence over a paged cache of keys and values.
#ifndef KERNELS_ATTENTION_DECODE_DECODE_H_
#define KERNELS_ATTENTION_DECODE_DECODE_H_

#include <cstdint>

#include "kernels/attention/decode/choose.h"
#include "kernels/attention/decode/kernels.h"
#include "kernels/sm90/checks.h"
#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct DecodeChoice {
  const DecodeKernel* kernel = nullptr;  // null for an empty output
  DecodeSplit split{};
  int64_t combined = 0;  // tiles that decode_combine looks at
  // Floats of the workspace.
  int64_t partial = 0, sums = 0, arrived = 0, tiles = 0;

  int rows() const { return 8 * kernel->tiles; }
  unsigned threads() const { return 32 * static_cast<unsigned>(kernel->warps); }
  int64_t workspace() const { return partial + sums + arrived + tiles; }
};

struct DecodeTensors {
  const TensorView* q = nullptr;        // [B, Sq, H, D] bfloat16 or float16
  const TensorView* k_cache = nullptr;  // [pages, page size, Hk, D] of q's dtype or float8_e4m3fn
  const TensorView* v_cache = nullptr;  // the same
  const TensorView* page_table = nullptr;  // [B, pages of a sequence] int32, rows contiguous
  const TensorView* seqused_k = nullptr;   // [B] int32: keys of each sequence
  const TensorView* out = nullptr;         // as q
  const TensorView* prefix = nullptr;      // [B] int32, or null
  const TensorView* k_scale = nullptr;     // float32, 1 or Hk elements, float8 only, or null: 1
  const TensorView* v_scale = nullptr;
  const TensorView* sinks = nullptr;      // [H] float32: one more score of each row, or null
  const TensorView* lse = nullptr;        // [B, H, Sq] float32, or null
  const TensorView* workspace = nullptr;  // float32, or null where DecodePlan::workspace is 0
};

// Query i of a sequence of n keys stands at key n - Sq + i and sees the keys from `left` before it
// to `right` after it, where a negative one is no limit, and those before prefix[b].
struct DecodeOptions {
  int64_t left = -1;
  int64_t right = 0;
  double scale = 1.0;
  double softcap = 0.0;
  int64_t max_keys = -1;  // of any sequence, if known: chooses the split, nothing else
  int split = 0;          // 0: as decode_choose() says; -1: spread; 1, 2, 4, 8: blocks a tile
};

// Sequences of several numbers of queries, behind each other: q and out are then rows [Tq, H, D] in
// the strides of the last three dimensions, and Sq is the most of a sequence; lse is [H, Tq].
// Sequence b has the rows from starts[b] to starts[b + 1], of any contents: both are cut to Tq.
// Rows of no sequence are 0, and minus infinity in lse.
struct DecodeRows {
  const TensorView* starts = nullptr;  // [B + 1] int32, or null: all have Sq queries
  int64_t total = 0;                   // Tq
  // [Tq] int64, or null: bit j of a row's word says that it sees new token j of its sequence, of 64
  // at most, in place of those up to its own. Each sees all keys before the new tokens.
  const TensorView* tree = nullptr;
  bool skips_longer = false;  // sequences of more than Sq queries: another kernel has their rows
};

struct DecodeCall {
  DecodeTensors tensors;
  DecodeOptions options;
  DecodeRows rows;
};

// The launches of a call.
struct DecodePlan {
  const char* kernel;   // "none" for an empty output
  const char* combine;  // a second kernel, or "none"
  int rows;             // of a tile: queries times heads of one key head
  int step;             // keys a warp takes at once
  int cluster;          // blocks that share one tile; 0: tiles are spread over all blocks
  unsigned grid;
  unsigned block;
  int64_t workspace;  // floats, of any initial value
};

// Checks a factor of stored keys or values; `heads` are theirs.
Status check_decode_scale(const Argument& scale, const Argument& q, int64_t heads, bool float8);

// All checks and the choice of kernel for a device with that many multiprocessors; needs no GPU and
// no driver. Ignores the workspace.
Status decode_attention_plan(const DecodeCall& call, int multiprocessors, DecodePlan* plan);

// A call that was checked and whose kernels were chosen.
class DecodeLaunch {
 public:
  // For the tensors' device; launches nothing.
  Status prepare(const DecodeCall& call);

  // Floats that `run` needs, of any value; 0 where the call needs none. Another launch may use the
  // same ones after this one in the stream.
  int64_t workspace() const { return choice_.workspace(); }

  // On `stream`, a CUstream; `workspace` starts at a multiple of 16 bytes.
  Status run(float* workspace, void* stream);

 private:
  DecodeArgs args_{};
  DecodeChoice choice_;
  DType dtype_ = DType::kBFloat16;
  int device_ = 0;
};

// Checks, chooses and launches with `tensors.workspace`. If that is needed and null, launches
// nothing and sets `*needed` to the number of floats.
Status decode_attention(const DecodeCall& call, void* stream, int64_t* needed);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_DECODE_DECODE_H_
