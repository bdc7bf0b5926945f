// SPDX-License-Identifier: Apache-2.0
// The two halves of an expert MLP over routed tokens.
#ifndef KERNELS_MOE_MOE_MLP_H_
#define KERNELS_MOE_MOE_MLP_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// What becomes of a row's two halves, a (the first I) and b.
enum class MoeActivation { kSilu, kGelu, kRelu, kGeluResidual };

// What a call would launch.
struct MoeMlpPlan {
  const char* kernel;  // "none" where nothing is to be done
  int tile_m;          // slots of the routing's blocks
  int tile_n;          // rows of weights, a tile
  int cluster;
  int tiles;  // at most: how many blocks are in use is known on the device only
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
};

// A kernel among those of the routing's block; zeros: what suits the problem.
struct MoeTile {
  int tile_n = 0;
  int cluster = 0;
};

// What moe_align_block_size made of topk_ids [T, k], all int32 and contiguous; or without lists,
// where MoeIds has the ids: then the kernels route them, in blocks of 64, and float8's may have
// num_tokens_post_padded [kMoeCounters], zeros before `up`. With lists num_tokens_post_padded is
// [1], or [moe_counters(blocks)] with counters that are zero before `up`. One is of the tiles that
// `up` has taken, one of `down`'s: blocks of threads take tiles of 128 rows as they come to them.
// The others are one a block: of rows in the routing's order `up` counts what it stores, but not
// with scales of rows; and `down` begins with blocks that are whole while `up` still works on
// others. That has to be the very next launch: after others it gets [1], or waits for ever.
struct MoeRouting {
  const TensorView* sorted_token_ids;
  const TensorView* expert_ids;
  const TensorView* num_tokens_post_padded;
  int64_t block_size;

  bool by_kernels() const { return sorted_token_ids == nullptr && expert_ids == nullptr; }
};

inline constexpr int64_t kMoeCounters = 4;
inline constexpr int64_t moe_counters(int64_t blocks) { return 3 + blocks; }

// Up to how many ids, and experts, the kernels route.
inline constexpr int64_t kMoeRoutedIds = 1024, kMoeRoutedExperts = 512;

// Of topk_ids itself. For `down`: with them, rows of ids that are no expert's (not within 0 to
// `experts` - 1, of all devices) are zeroed, since they are in no block. For `down`, and for `up`
// of float8 in blocks of 64, they also say that the routing, or what it is to be made of, was made
// before the launch before this one, so that this one may read it before that has ended.
struct MoeIds {
  const TensorView* ids;  // [T, k] int32 or int64, contiguous; or null
  int64_t experts;
};

// Of float8 x and w, both float32: [rows of x] or [1], and [E, rows of w] or [E, 1]; or, of 1x128
// and 128x128 values, [rows of x, columns / 128] and [E, rows of w / 128, columns / 128].
// Contiguous. With other dtypes both are null. Of `up`'s result, with scales of 1x128 values and
// blocks of 128: float32 [rows of out, I / 128] where out is to be float8_e4m3fn, else null.
struct MoeScales {
  const TensorView* x;
  const TensorView* w;
  const TensorView* out;
};

// x [T, H], w [E, 2 * I, H], out [elements, I] with elements a multiple of T: element e of topk_ids
// is of row e / (elements / T) of x.
//   [a, b] = x @ w[expert].T;  out = silu(a) * b, gelu(a) * b, relu(a) * b, or gelu(a) * (b + 1)
// x [elements, I], w [E, H, I], weights [elements] float32 or null, out [elements, H].
//   out = weights * (x @ w[expert].T); zeros where the expert is -1
// For blocks of 128 and 16-bit dtypes, or scales of blocks, the rows between the halves may be in
// the routing's order: then `up` has ids and its out, and the x of `down`, have a row a slot of
// sorted_token_ids. The padding's are not written.
// bfloat16, float16, or float8_e4m3fn with a bfloat16 result, or one as fp8_quantize makes of that;
// float32 sums. Rows of x and w are of
// neighbouring elements, at multiples of 16 bytes, and of a multiple of 16 bytes; out is contiguous
// with rows of a multiple of 8 elements. What the routing leaves out is not written. Lists may hold
// anything: what is no element counts as padding, what is no expert as -1, and a number of slots as
// the nearest that there are, in whole blocks.

// All checks and the choice of kernel for a device with that many multiprocessors; needs no GPU and
// no driver.
Status moe_mlp_plan(bool up, const TensorView& x, const TensorView& w, const MoeScales& scales,
                    const MoeRouting& routing, const TensorView* weights, const MoeIds& ids,
                    const TensorView& out, MoeActivation activation, const MoeTile& tile,
                    int multiprocessors, MoeMlpPlan* plan);

// The same for the tensors' device, then the launch on `stream` (a CUstream).
Status moe_up(const TensorView& x, const TensorView& w, const MoeScales& scales,
              const MoeRouting& routing, const MoeIds& ids, const TensorView& out,
              MoeActivation activation, const MoeTile& tile, void* stream);
Status moe_down(const TensorView& x, const TensorView& w, const MoeScales& scales,
                const MoeRouting& routing, const TensorView* weights, const MoeIds& ids,
                const TensorView& out, const MoeTile& tile, void* stream);

Status moe_mlp_load(int device);

}  // namespace tiercel

#endif  // KERNELS_MOE_MOE_MLP_H_
