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
  int steps;       // of kW4Step values of K, all blocks of a cluster together
  int first_tile;  // of the launch
};

inline constexpr int kW4Step = 128;       // values of K, a stage
inline constexpr int kW4Rows = 128;       // of the weight, a block
inline constexpr int kW4Consumers = 256;  // threads of a group, which multiply a stage
inline constexpr int kW4MaxShared = 226 * 1024;

// Registers of a thread that multiplies, alone on a multiprocessor, where the loader's warpgroup
// gives some away, and what that keeps: of 384 threads times 168, 128 times 24 and 256 times 240,
// or 40 and 232 where it brings scales; of 640 times 96, 128 times 32 and 512 times 112. 0 where
// threads keep what they have.
constexpr int w4_dealt_registers(int together, int groups, bool scales) {
  return together > 1 ? 0 : groups == 2 ? 112 : scales ? 232 : 240;
}
constexpr int w4_left_registers(int groups, bool scales) {
  return groups == 2 ? 32 : scales ? 40 : 24;
}
// With the loader: a warp of it, or a warpgroup where registers are dealt out again.
constexpr int w4_threads(int together, int groups) {
  return kW4Consumers * groups + (together == 1 ? 128 : 32);
}

struct W4TilesKernel {
  int tokens;   // of a block
  bool floats;  // e2m1 weights; else whole numbers
  bool bfloat16;
  int groups;    // of threads, which take stages in turn
  int together;  // blocks per multiprocessor
  int stages;
  Kernel kernel;
};

// A stage's scales, 16 bytes a row. The kernels for float8 read theirs themselves.
constexpr int w4_scale_bytes(int value_bytes) { return value_bytes == 2 ? kW4Rows * 16 : 0; }

constexpr int w4_stage_bytes(int tokens, int value_bytes) {
  return kW4Rows * (kW4Step / 2) + tokens * (kW4Step * value_bytes) + w4_scale_bytes(value_bytes);
}

// In place of the stages: sums that a block's groups exchange,
constexpr int w4_exchange_bytes(int tokens, int groups) {
  return groups == 1 ? 0 : tokens * kW4Rows * 4;
}
inline constexpr int kW4PartBytes = 16 * kW4Rows * 4;  // sums of 16 tokens from another block,
inline constexpr int kW4ResultRow = kW4Rows * 2 + 16;  // and a token's results.

constexpr int w4_result_bytes(int tokens, int groups, int blocks, bool parts) {
  const int pairs = (tokens / 16 + blocks - 1) / blocks;
  return w4_exchange_bytes(tokens, groups) + (parts ? blocks * pairs * kW4PartBytes : 0) +
         pairs * 16 * kW4ResultRow;
}

const W4TilesKernel* w4_tiles_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_GEMV_W4_TILES_KERNELS_H_
