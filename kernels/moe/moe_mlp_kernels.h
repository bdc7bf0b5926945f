// SPDX-License-Identifier: Apache-2.0
// What the launchers of moe_up and moe_down and their device code agree on.
#ifndef KERNELS_MOE_MOE_MLP_KERNELS_H_
#define KERNELS_MOE_MOE_MLP_KERNELS_H_

#include <cstdint>

#include "kernels/moe/moe_mlp.h"
#include "kernels/sm90/launch.h"

namespace tiercel {

struct MoeMlpArgs {
  const char* x;
  int64_t x_row;  // bytes
  int divide;     // element e of topk_ids has row e / divide of x
  const char* w;
  int64_t w_expert;
  int64_t w_row;
  int64_t w_second;  // from a row of a unit's first 16 to its partner in the second
  int tiles;         // of kMoeTile rows of the output (up) or twice that (down), an expert
  int rows;          // of the output
  int k;
  const int32_t* sorted_ids;
  const int32_t* expert_ids;
  const int32_t* used;   // slots
  int elements;          // of topk_ids
  const float* weights;  // [elements], or null
  uint16_t* out;         // [elements, rows], contiguous
  MoeActivation activation;
};

inline constexpr int kMoeTile = 16;  // rows of a product
inline constexpr int kMoeStep = 64;  // values of K in a stage
inline constexpr int kMoeWarps = 8;
inline constexpr int kMoeRowBytes = kMoeStep * 2;

// Stages in flight, a warp: what fits, with as many bytes on their way as the memory needs.
constexpr int moe_stages(int tokens) { return tokens <= 8 ? 5 : tokens <= 16 ? 4 : 3; }
constexpr int moe_stage_bytes(int tokens) { return (2 * kMoeTile + tokens) * kMoeRowBytes; }
constexpr int moe_shared(int tokens) {
  return kMoeWarps * moe_stages(tokens) * moe_stage_bytes(tokens);
}
// A unit must outlast the ring.
inline constexpr int kMoeLeastK = 5 * kMoeStep;

// For blocks of `tokens` slots: 8, 16 or 32; null where there is none.
const Kernel* moe_mlp_kernel(bool up, DType dtype, int tokens);

}  // namespace tiercel

#endif  // KERNELS_MOE_MOE_MLP_KERNELS_H_
