// SPDX-License-Identifier: Apache-2.0
// The interface of cross-entropy's host and device code: the kernels' arguments and table.
#ifndef KERNELS_LOSS_CROSS_ENTROPY_KERNELS_H_
#define KERNELS_LOSS_CROSS_ENTROPY_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct CrossEntropyTargets {
  const char* data;
  int64_t step;  // bytes
  int64_t ignore_index;
  bool wide;  // int64, otherwise int32
};

struct CrossEntropyArgs {
  const char* x;  // the logits
  char* grad;     // or null; possibly x
  int64_t x_stride;
  int64_t grad_stride;  // bytes
  CrossEntropyTargets target;
  const float* weight;  // of each class, or null
  const float* scale;   // of each row's loss and gradient, or null
  int64_t scale_step;   // elements: 0 if all rows have the same
  float* loss;
  int columns;
  float smoothing;
  float z_loss;
  float softcap;    // 0: none
  uint32_t blocks;  // per row
  int64_t rows;
  int warp_vectors;  // of shared memory, where a warp has a row
  bool vectors;      // the rows of grad have the logits' offset from a multiple of 16 bytes
  float* entropy;    // of each row, in kernels for it
  const float* entropy_scale;  // of each row's gradient of the entropy, or null: 0
};

struct CrossEntropyScaleArgs {
  CrossEntropyTargets target;
  int64_t rows;
  const float* weight;  // or null
  int columns;
  float* scale;
};

struct CrossEntropyRescaleArgs {
  char* grad;
  int64_t rows;
  int64_t row_stride;  // bytes
  int columns;
  const float* factor;
  int64_t factor_step;  // elements: 0 if all rows have the same
};

struct CrossEntropyKernel {
  DType dtype;
  bool gradient;
  bool entropy;
  Kernel kernel;
};

struct CrossEntropyShortKernel {
  DType dtype;
  bool entropy;
  Kernel kernel;
};

struct CrossEntropyFormatKernel {
  DType dtype;
  Kernel kernel;
};

inline constexpr int kLossVectorBytes = 16;
inline constexpr int kLossThreads = 256;  // per block
inline constexpr int kLossScaleThreads = 1024;
inline constexpr int kLossBlocks = 8;  // at most, per row: the portable limit of clusters
inline constexpr int kLossChunks = 4;  // copies that a block waits for one by one
// A block's part of a row, bytes: three blocks per multiprocessor, or one for the longest rows.
inline constexpr int kLossPart = 71 << 10;
inline constexpr int kLossLargestPart = 216 << 10;
// The longest row of a warp, with the vector that it may begin in: 1024 or 2048 logits.
inline constexpr int kLossWarpRow = (4 << 10) + kLossVectorBytes;

const CrossEntropyKernel* cross_entropy_kernels(int* count);
const CrossEntropyShortKernel* cross_entropy_short_kernels(int* count);
const CrossEntropyFormatKernel* cross_entropy_rescale_kernels(int* count);
extern const Kernel kCrossEntropyScale;

}  // namespace tiercel

#endif  // KERNELS_LOSS_CROSS_ENTROPY_KERNELS_H_
