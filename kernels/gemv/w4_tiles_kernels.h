// SPDX-License-Identifier: Apache-2.0
// The interface of w4_linear's host and device code for many tokens.
#ifndef KERNELS_GEMV_W4_TILES_KERNELS_H_
#define KERNELS_GEMV_W4_TILES_KERNELS_H_

#include <cuda.h>

#include <cstdint>

#include "kernels/gemv/w4_format.h"
#include "kernels/sm90/launch.h"

namespace tiercel {

struct W4TilesArgs {
  CUtensorMap weight_map;  // boxes of 64 bytes and a block's rows of the weight
  CUtensorMap x_map;       // boxes of 64 values and a block's tokens
  W4Scales scales;
  W4Epilogue epilogue;
  uint16_t* out;  // contiguous
  int tokens;
  int features;  // rows of the weight
  int k;
  int token_tiles;
  int steps;  // of kW4Step values of K, all blocks of a cluster together
};

inline constexpr int kW4Step = 128;       // values of K, a stage
inline constexpr int kW4Consumers = 256;  // threads that multiply
// With the loader: a warp of it, or a warpgroup where registers are dealt out again.
constexpr int w4_threads(int together) { return kW4Consumers + (together == 1 ? 128 : 32); }
inline constexpr int kW4MaxShared = 226 * 1024;

struct W4TilesKernel {
  int tokens;   // of a block
  int rows;     // of the weight, a block
  bool floats;  // e2m1 weights; else whole numbers
  bool bfloat16;
  int together;  // blocks per multiprocessor
  int stages;
  Kernel kernel;
};

constexpr int w4_stage_bytes(int tokens, int rows, int value_bytes) {
  return rows * (kW4Step / 2) + tokens * (kW4Step * value_bytes);
}

// Bytes for the sums of the blocks of a cluster and for the result, in place of the stages.
constexpr int w4_result_bytes(int tokens, int rows, bool split) {
  return rows * tokens * (split ? 4 : 0) + tokens * (rows * 2 + 16);
}

const W4TilesKernel* w4_tiles_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_GEMV_W4_TILES_KERNELS_H_
