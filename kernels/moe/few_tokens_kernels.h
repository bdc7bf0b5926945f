// SPDX-License-Identifier: Apache-2.0
// The interface between the host code of fused_moe for few tokens and its kernels.
#ifndef KERNELS_MOE_FEW_TOKENS_KERNELS_H_
#define KERNELS_MOE_FEW_TOKENS_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"

namespace tiercel {

inline constexpr int kFewIds = 32;     // T * k at most: one per lane
inline constexpr int kFewColumns = 8;  // tokens of an expert multiplied at a time
inline constexpr int kFewRows = 16;    // rows of weights per unit
inline constexpr int kFewWarps = 16;   // multiplying warps, in groups that share a unit
inline constexpr int kFewGroups = 4;
inline constexpr int kFewThreads = (kFewWarps + 1) * 32;
inline constexpr int kFewInFlight = 48 * 1024;  // bytes in flight per multiprocessor
inline constexpr int kFewWaits = 16;  // T * k up to which blocks wait for a count of blocks
inline constexpr int kFewPad = 64;  // bytes behind a row of x, so that the next one has other banks
inline constexpr int kFewMaxSlots = 16;
inline constexpr int kFewKnown = 16;  // units that the loader is ahead, at most
inline constexpr int kFewPartBytes = 2 * kFewWarps * 32 * 16;  // sums of two units per group
inline constexpr int kFewMaxShared = 226 * 1024;
inline constexpr int kFewInnerMost =
    7 * 256;  // I: each lane of a warp has up to seven times eight values
inline constexpr int kFewInner = kFewIds * 1408;  // values between the halves, T * k * I

struct FewTokensArgs {
  const char* x;       // rows of H 16-bit values
  const char* w_up;    // [E, 2 * I, H]
  const char* w_down;  // [E, H, I]
  const float* up_scale;
  const float* down_scale;
  const void* ids;
  const float* weights;            // [T * k]
  char* y;                         // [T, H]
  int64_t x_row;                   // bytes
  int64_t up_expert, down_expert;  // bytes; an expert's rows follow each other
  int tokens, per_token, experts, hidden, inner_size;
  int id_words;
  int activation;
  // Strides of the scales: between experts, and between rows (or blocks) of weights.
  int up_scale_expert, up_scale_step, down_scale_expert, down_scale_step;
  // Shared memory: the ring's slots and their bytes; offsets of the other parts.
  int slots, slot_bytes;
  int in_flight;  // slots that are loaded at the same time, at most
  bool waits;     // for a count of blocks, before it reads rows between the halves
  int x_offset, down_scales_offset, row_scales_offset;
};

// For weights with a scale per row (or expert), or with `blocks` per 128x128 values.
const Kernel& few_tokens_kernel(bool blocks);

// Bytes of shared memory per thread block beside the ring, rows and scales.
int few_tokens_fixed_shared();

}  // namespace tiercel

#endif  // KERNELS_MOE_FEW_TOKENS_KERNELS_H_
