// SPDX-License-Identifier: Apache-2.0
// The interface of w4_moe's host and device code.
#ifndef KERNELS_MOE_W4_MOE_KERNELS_H_
#define KERNELS_MOE_W4_MOE_KERNELS_H_

#include <cuda.h>

#include <cstdint>

#include "kernels/gemv/w4_format.h"
#include "kernels/moe/w4_moe.h"
#include "kernels/sm90/launch.h"

namespace tiercel {

inline constexpr int kW4MoeStep = 128;  // values of K, a stage

// The 16 rows of a group of the weight are those at
//   group * rows.group + half * rows.half + i * rows.next,  half < 2, i < 8.
// Gated, half 0 has the gates of 8 features and half 1 what they are for.
struct W4MoeRows {
  int group, half, next;
};

struct W4MoeArgs {
  CUtensorMap weight_map;     // [E, groups, 2, 8, K / 2]; boxes of 64 bytes of a tile's rows
  W4Scales scales;            // [E * weight_rows, K / group]
  const float* global_scale;  // [E], or null
  const uint16_t* bias;       // [E, weight_rows], or null
  const char* x;
  int64_t x_row;  // bytes
  uint16_t* out;  // [elements, features], contiguous
  // The lists of the routing; or null: block b is element b, at the expert of its id.
  const int32_t* slots;
  const int32_t* expert_ids;
  const int32_t* used;
  const void* ids;  // [elements]
  bool wide_ids;    // int64
  int bound;        // ids from 0 to it, exclusive, are in a block
  int slot_count;
  int elements;
  int divide;  // element e reads row e / divide of x
  int experts;
  int weight_rows;  // an expert
  W4MoeRows rows;
  int features;
  int k;
  int steps;
  int part_steps;  // of them, a part of K has: each block of a cluster has a part
  int row_tiles;
  // For few tokens:
  int block_tokens;  // of a block of the routing
  int stages;        // even
  int stage_bytes;
  W4MoeActivation activation;
  float alpha, limit;
  bool gated;
  bool down;  // rows without an expert are zeros, and the routing is older than the last launch
};

// For x in e4m3: a scale for each row, or one for all with a step of 0.
struct W4MoeFloat8Args {
  W4MoeArgs moe;
  const float* x_scale;
  int x_scale_step;
};

struct W4MoeKernel {
  int tokens;  // of a block of the routing; few tokens: at most
  int rows;    // of the weight, a tile
  bool floats;
  bool bfloat16;
  int stages;  // few tokens: at most
  Kernel kernel;
  // For x in e4m3:
  int group = 0;     // of whole numbers: sums are scaled after so many values of K
  int together = 0;  // blocks per multiprocessor
};

// Threads that multiply, by the rows of a tile: few tokens have 64. The others load.
constexpr int w4_moe_consumers(int rows) { return rows == 64 ? 256 : rows * 2; }
constexpr int w4_moe_loaders(int rows) { return rows == 192 ? 128 : 64; }
constexpr int w4_moe_threads(int rows) { return w4_moe_consumers(rows) + w4_moe_loaders(rows); }

inline constexpr int kW4MoeFewTokens = 32;           // a block of few tokens has 8, 16 or 32
inline constexpr int kW4MoeFewStages = 16;           // at most
inline constexpr int kW4MoeMostShared = 226 * 1024;  // dynamic shared memory of a thread block

// x, weights and, of many tokens, 16 bytes of scales a row.
constexpr int w4_moe_stage_bytes(int tokens, int rows) {
  const int scales = rows == 64 ? 0 : 16;
  return tokens * (kW4MoeStep * 2) + rows * (kW4MoeStep / 2 + scales);
}

inline constexpr int kW4MoeFloat8Rows = 128;   // of the weight, a tile with x in e4m3
inline constexpr int kW4MoeFloat8Tokens = 32;  // the smaller kernels' blocks have up to so many

// Two warps load, or a warpgroup where registers are dealt out again.
constexpr int w4_moe_float8_threads(int together) {
  return w4_moe_consumers(kW4MoeFloat8Rows) + (together == 1 ? 128 : 64);
}

constexpr int w4_moe_float8_stage_bytes(int tokens) {
  return tokens * kW4MoeStep + kW4MoeFloat8Rows * (kW4MoeStep / 2);
}

const W4MoeKernel* w4_moe_kernels(int* count);
const W4MoeKernel* w4_moe_float8_kernels(int* count);  // for x in e4m3

}  // namespace tiercel

#endif  // KERNELS_MOE_W4_MOE_KERNELS_H_
