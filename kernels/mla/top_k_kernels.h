// SPDX-License-Identifier: Apache-2.0
// The interface of top_k's host and device code.
#ifndef KERNELS_MLA_TOP_K_KERNELS_H_
#define KERNELS_MLA_TOP_K_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"

namespace tiercel {

inline constexpr int kTopKThreads = 512;
inline constexpr int kTopKBins = 2048;
inline constexpr int kTopKStateBytes = 16640;  // counts and sums
inline constexpr int kTopKKept = 22528;        // elements of a block: two blocks fit beside another
inline constexpr int kTopKMostBlocks = 8;      // of a row
inline constexpr int kTopKLeastPart = 4096;    // elements of a block, where there are several
inline constexpr uint32_t kTopKShared = kTopKStateBytes + kTopKKept * 4;

// For the kernel that samples rows: two thirds of a multiprocessor's memory are left to others.
inline constexpr int kTopKSampling = 8;         // one element of so many
inline constexpr int kTopKSampledShare = 16;    // at most one of so many is chosen
inline constexpr int kTopKSampledPart = 65536;  // most elements of a block
inline constexpr int kTopKLeastSampled = 8192;  // elements of a block
inline constexpr int kTopKListed = 6144;        // elements that a block has room for
inline constexpr uint32_t kTopKSampledShared = kTopKStateBytes + kTopKListed * 8;

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
const TopKKernel* top_k_sampled_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_MLA_TOP_K_KERNELS_H_
