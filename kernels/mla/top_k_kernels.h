// SPDX-License-Identifier: Apache-2.0
// The interface of top_k's host and device code.
#ifndef KERNELS_MLA_TOP_K_KERNELS_H_
#define KERNELS_MLA_TOP_K_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"

namespace tiercel {

inline constexpr int kTopKThreads = 512;
inline constexpr int kTopKBins = 2048;
inline constexpr int kTopKState = 24832;     // bytes: counts and sums
inline constexpr int kTopKKept = 22528;      // elements of a block: two blocks fit beside another
inline constexpr int kTopKMostBlocks = 8;    // of a row
inline constexpr int kTopKLeastPart = 4096;  // elements of a block, where there are several
inline constexpr uint32_t kTopKShared = kTopKState + kTopKKept * 4;

struct TopKArgs {
  const float* logits;
  const int32_t* lengths;  // of the rows, clamped to what there is; or null: all
  int32_t* out;            // [rows, k]
  int64_t row_stride;      // elements
  int64_t length_step;
  uint32_t k;
  int columns;
  int kept;      // elements that a block has room for
  bool vectors;  // rows start at multiples of 16 bytes
};

struct TopKKernel {
  Kernel kernel;
};

const TopKKernel* top_k_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_MLA_TOP_K_KERNELS_H_
