// SPDX-License-Identifier: Apache-2.0
// What nvfp4_linear's launcher and its device code agree on.
#ifndef KERNELS_GEMV_NVFP4_LINEAR_KERNELS_H_
#define KERNELS_GEMV_NVFP4_LINEAR_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"

namespace tiercel {

struct Nvfp4LinearArgs {
  const char* x;
  int64_t x_row;  // bytes from one token to the next
  const char* weight;
  int64_t weight_row;
  const char* scale;
  int64_t scale_row;
  const float* global_scale;  // or null: 1
  uint16_t* out;              // contiguous
  int tokens;
  int features;  // rows of the weight
  int k;
  int parts;         // warps that share a tile of 16 rows, along K
  int block_stages;  // of K that a block of the cluster has
};

inline constexpr int kLinearStage = 256;  // values of K that a warp takes at a time
inline constexpr int kLinearMaxTokens = 16;
// Shared memory of one stage of one warp: 16 rows of weights and of scales.
inline constexpr int kLinearStageBytes = 16 * (kLinearStage / 2 + kLinearStage / 16);
inline constexpr int kLinearMaxShared = 226 * 1024;  // of 227 KiB, some are the kernel's own

// A block's threads: more tokens need more registers.
constexpr int linear_max_threads(int tokens) { return tokens > 8 ? 768 : 896; }

// Up to `tokens` tokens, 8 or 16, with that many stages in flight a warp; null where there is none.
const Kernel* nvfp4_linear_kernel(int tokens, int stages);

}  // namespace tiercel

#endif  // KERNELS_GEMV_NVFP4_LINEAR_KERNELS_H_
