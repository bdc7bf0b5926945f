// SPDX-License-Identifier: Apache-2.0
// What nvfp4_linear's launcher and its device code agree on.
#ifndef KERNELS_GEMV_NVFP4_LINEAR_KERNELS_H_
#define KERNELS_GEMV_NVFP4_LINEAR_KERNELS_H_

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90/launch.h"

namespace tiercel {

struct Nvfp4LinearArgs {
  CUtensorMap weight_map;  // boxes of 16 rows and 128 bytes
  const char* x;
  int64_t x_row;  // bytes from one token to the next
  const char* scale;
  int64_t scale_row;
  const float* global_scale;  // or null: 1
  uint16_t* out;              // contiguous
  int tokens;
  int features;  // rows of the weight
  int k;
  int tiles;      // of 16 rows, which a block has at a time
  int parts;      // warps that share one of them, along K
  int passes;     // of a section: lines of K that a warp has one after another
  int sections;   // of K, as many as x needs to fit
  int all_turns;  // of a block's rows at a time
  int turns;      // of one block
  int group;      // of these, after which their sums meet
  bool ahead;     // first weights are wanted in the L2 before the grid before has ended
};

inline constexpr int kLinearMaxTokens = 16;
inline constexpr int kLinearMaxShared = 226 * 1024;  // of 227 KiB

// Of a block: as many as leave the registers that the kernel wants.
constexpr int linear_max_threads(int tokens) { return tokens == 1 ? 640 : tokens <= 8 ? 896 : 768; }

inline constexpr int kLinearLine = 256;  // values of K, 128 bytes of weights
// Of x: what a warp takes at a time, of 8 tokens, apart so that storing it too uses all banks; and
// all of these of a line.
inline constexpr int kLinearPieceBytes = 512 + 16;
inline constexpr int kLinearTileBytes = 8 * kLinearPieceBytes;

// Shared memory for a line of x; of a single token with what to multiply by again.
constexpr int linear_line_bytes(int tokens) {
  return tokens == 1 ? kLinearLine * 2 + 16 : (tokens + 7) / 8 * kLinearTileBytes;
}
inline constexpr int kLinearZeroBytes = 192;  // of a single token, behind its lines

// Shared memory of one stage of one warp: a line of 16 rows of weights, and the barrier that says
// that it has come, with room for the one of the sums and the next array's alignment.
inline constexpr int kLinearStageBytes = 16 * (kLinearLine / 2 + 1);

// Of the sums of 16 rows that a warp has, for that many tokens.
constexpr int linear_sum_bytes(int tokens) { return tokens == 1 ? 64 : tokens <= 8 ? 512 : 1024; }

// For up to `tokens` tokens, with that many stages a warp; null where there is none.
const Kernel* nvfp4_linear_kernel(int tokens, int stages);

}  // namespace tiercel

#endif  // KERNELS_GEMV_NVFP4_LINEAR_KERNELS_H_
