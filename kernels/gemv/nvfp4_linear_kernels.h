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
  CUtensorMap scale_map;   // of 16 rows and what belongs to a warp's part of K; or nothing
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
  int passes;     // that those of a cluster need for all of K
  int all_turns;  // of a block's rows at a time
  int turns;      // of one block
  int group;      // of these, after which their sums meet
};

inline constexpr int kLinearMaxTokens = 16;
inline constexpr int kLinearMaxThreads = 512;        // a block: there are 128 registers for each
inline constexpr int kLinearMaxShared = 226 * 1024;  // of 227 KiB

inline constexpr int kLinearSlice = 256;  // values of K of which a warp keeps x

// Shared memory of one stage of one warp: 16 rows of weights and of scales, and the barrier that
// says that they have come, with room for the next array's alignment.
inline constexpr int kLinearStageBytes = 16 * (kLinearSlice / 2 + kLinearSlice / 16 + 1);

// Of the sums of 16 rows that a warp has, for that many tokens.
constexpr int linear_sum_bytes(int tokens) { return tokens == 1 ? 64 : tokens <= 8 ? 512 : 1024; }

// For up to `tokens` tokens, with that many stages in flight a warp, for a scale that the copy
// engine takes (`boxes`: rows at multiples of 16 bytes) or any; null where there is none.
const Kernel* nvfp4_linear_kernel(int tokens, int stages, bool boxes);

}  // namespace tiercel

#endif  // KERNELS_GEMV_NVFP4_LINEAR_KERNELS_H_
