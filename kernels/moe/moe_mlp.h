// SPDX-License-Identifier: Apache-2.0
// The two halves of an expert MLP over routed tokens.
#ifndef KERNELS_MOE_MOE_MLP_H_
#define KERNELS_MOE_MOE_MLP_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// How the two halves of a row, a (the first I) and b, are combined; see below.
enum class MoeActivation { kSilu, kGelu, kRelu, kGeluResidual };

// The launch that a call would make.
struct MoeMlpPlan {
  const char* kernel;  // "none" where nothing is to be done
  int tile_m;          // slots per block of the routing
  int tile_n;          // rows of weights per tile
  int cluster;
  int tiles;  // an upper bound: only the device knows how many blocks are in use
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
};

// Selects a kernel for the routing's block size; zeros: the heuristic chooses.
struct MoeTile {
  int tile_n = 0;
  int cluster = 0;
};

// The lists that moe_align_block_size makes from topk_ids [T, k], all int32 and contiguous. Without
// lists the kernels route the ids of MoeIds themselves, in blocks of 64; float8 kernels may then
// get num_tokens_post_padded [kMoeCounters], all zero before `up`.
//
// With lists, num_tokens_post_padded is [1], or [moe_counters(blocks)] with counters behind its
// first element that are zero before `up`. Counter 1 counts the tiles that `up` has taken, counter
// 2 those of `down`: thread blocks take tiles of 128 rows as they get to them. The others are one
// per block. If its rows are in the routing's order and have no scale per row, `up` counts what it
// stores, and `down` begins with complete blocks while `up` still works on others. `down` has to be
// the very next launch then: after another one it must get [1], or it waits for ever.
struct MoeRouting {
  const TensorView* sorted_token_ids = nullptr;
  const TensorView* expert_ids = nullptr;
  const TensorView* num_tokens_post_padded = nullptr;
  int64_t block_size = 0;

  bool by_kernels() const { return sorted_token_ids == nullptr && expert_ids == nullptr; }
};

inline constexpr int64_t kMoeCounters = 4;
inline constexpr int64_t moe_counters(int64_t blocks) { return 3 + blocks; }

// The most ids and experts that the kernels route.
inline constexpr int64_t kMoeRoutedIds = 1024, kMoeRoutedExperts = 512;

// topk_ids itself. With it, `down` writes zeros to the rows of ids that name no expert (outside 0
// to `experts` - 1, counting the experts of all devices), since they are in no block. For `down`,
// and for float8 `up` in blocks of 64, it also promises that the routing, or topk_ids where the
// kernels route, was complete before the previous launch began, so that this one may read it before
// the previous one has ended.
struct MoeIds {
  const TensorView* ids = nullptr;  // [T, k] int32 or int64, contiguous; or null
  int64_t experts = 0;
};

// Scales of float8 operands, float32 and contiguous; null for other dtypes. x: [rows of x] or [1],
// w: [E, rows of w] or [E, 1]. With a scale per 1x128 and 128x128 values x: [rows of x, columns /
// 128], w: [E, rows of w / 128, columns / 128]; then, in blocks of 128, `up` may store
// float8_e4m3fn with out: [rows of out, I / 128], else null.
struct MoeScales {
  const TensorView* x = nullptr;
  const TensorView* w = nullptr;
  const TensorView* out = nullptr;
};

// x [T, H], w [E, 2 * I, H], out [elements, I] with elements a multiple of T: element e of topk_ids
// reads row e / (elements / T) of x.
//   [a, b] = x @ w[expert].T;  out = silu(a) * b, gelu(a) * b, relu(a) * b, or gelu(a) * (b + 1)
// x [elements, I], w [E, H, I], weights [elements] float32 or null, out [elements, H].
//   out = weights * (x @ w[expert].T); zeros where the expert is -1
// In blocks of 128, with 16-bit dtypes or block scales, the rows between the halves may be in the
// routing's order: then `up` gets ids, and its out and the x of `down` have a row per slot of
// sorted_token_ids. Rows of padding are not written.
//
// bfloat16, float16, or float8_e4m3fn with a bfloat16 result (or that result quantised as by
// fp8_quantize); float32 sums. Rows of x and w are contiguous, begin at multiples of 16 bytes and
// have a multiple of 16 bytes; out is contiguous with rows of a multiple of 8 elements. Elements
// that the routing leaves out are not written. The lists may hold anything: a value that is no
// element counts as padding, one that is no expert as -1, and a number of slots as the nearest
// possible one, in whole blocks.
struct MoeMlpCall {
  const TensorView* x = nullptr;
  const TensorView* w = nullptr;
  MoeRouting routing;
  const TensorView* weights = nullptr;  // of `down`
  const TensorView* out = nullptr;
  MoeActivation activation = MoeActivation::kSilu;  // of `up`
  MoeIds ids;
  MoeScales scales;
  MoeTile tile;
};

// All checks and the choice of kernel for a device with that many multiprocessors. Needs no GPU and
// no driver.
Status moe_up_plan(const MoeMlpCall& call, int multiprocessors, MoeMlpPlan* plan);
Status moe_down_plan(const MoeMlpCall& call, int multiprocessors, MoeMlpPlan* plan);

// Plans for the tensors' device and launches on `stream` (a CUstream).
Status moe_up(const MoeMlpCall& call, void* stream);
Status moe_down(const MoeMlpCall& call, void* stream);

Status moe_mlp_load(int device);

}  // namespace tiercel

#endif  // KERNELS_MOE_MOE_MLP_H_
