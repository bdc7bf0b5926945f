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
  int prefetch_scales;
};

inline constexpr int kW4Step = 128;  // values of K, a stage
inline constexpr int kW4MaxShared = 226 * 1024;

// Threads that multiply: for each group of warps that takes stages in turn, two a row.
constexpr int w4_consumers(int rows, int groups) { return rows * 2 * groups; }
// Registers of such a thread, alone on a multiprocessor, where the loader's warpgroup gives some
// away: of 384 threads times 168, 128 times 24 and 256 times 240; of 640 times 96, 128 times 24
// and 512 times 112. 0 where threads keep what they have.
constexpr int w4_dealt_registers(int together, int consumers) {
  return together > 1 ? 0 : consumers == 256 ? 240 : 112;
}
// With the loader: a warp of it, or a warpgroup where registers are dealt out again.
constexpr int w4_threads(int rows, int groups, int together) {
  return w4_consumers(rows, groups) + (together == 1 ? 128 : 32);
}

struct W4TilesKernel {
  int tokens;   // of a block
  int rows;     // of the weight, a block
  bool floats;  // e2m1 weights; else whole numbers
  bool bfloat16;
  int groups;    // of warps, which take stages in turn
  int together;  // blocks per multiprocessor
  int stages;
  int variant;
  Kernel kernel;
};

constexpr int w4_stage_bytes(int tokens, int rows, int value_bytes) {
  return rows * (kW4Step / 2) + tokens * (kW4Step * value_bytes);
}

// In place of the stages: the sums of 16 tokens from a block of the cluster, and results of one.
constexpr int w4_part_bytes(int rows) { return 16 * rows * 4; }
constexpr int w4_result_row(int rows) { return rows * 2 + 16; }

constexpr int w4_result_bytes(int tokens, int rows, int groups, int blocks, bool parts) {
  const int pairs = (tokens / 16 + blocks - 1) / blocks;
  const int exchange = groups == 1 ? 0 : groups * tokens * rows * 4;
  const int results =
      (parts ? blocks * pairs * w4_part_bytes(rows) : 0) + pairs * 16 * w4_result_row(rows);
  return exchange > results ? exchange : results;
}

const W4TilesKernel* w4_tiles_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_GEMV_W4_TILES_KERNELS_H_
