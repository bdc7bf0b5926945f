// SPDX-License-Identifier: Apache-2.0
// The interface of fp8_quantize's host and device code.
#ifndef KERNELS_QUANT_FP8_QUANTIZE_KERNELS_H_
#define KERNELS_QUANT_FP8_QUANTIZE_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kFp8Counters = 4;

struct Fp8QuantizeArgs {
  const char* x;
  int64_t row_bytes;  // from one row of x to the next
  char* q;            // contiguous
  float* scale;
  const float* given;  // per tensor: the scale to use, or null
  int32_t* counters;   // rows, groups: kFp8Counters to clear, or null
  float* partial;      // per tensor: a maximum per block of the first kernel
  int64_t rows;
  int64_t columns;
  int eights;      // per row: columns / 8
  int row_blocks;  // blocks per row of blocks, for kBlock and for kGroup if not flat
  int partials;
  int prefetch_blocks;  // blocks that prefetch their data to L2 before they may read it
  bool waits_last;      // rows, groups: x is older than the previous kernel
  bool starts_next;     // rows, groups: the next kernel may start at once
  bool aligned16;       // kGroup, kTensor: all rows of q begin at multiples of 16 bytes
  bool flat;            // no gaps between rows; kGroup: and whole groups per row
};

enum class Fp8Kernel {
  kRow,          // a block or a warp per row, which stays in registers
  kLongRow,      // a block per row, read twice
  kGroup,        // 8 or 16 lanes per group of 128
  kBlock,        // a block per tile of 128x128
  kLargest,      // the maximum per block
  kTensor,       // with a known scale
  kSmallTensor,  // one cluster, which keeps x in registers
};

inline constexpr int kFp8RowMaxThreads = 1024;
inline constexpr int kFp8RowsPerBlock = 8;  // with a warp per row
inline constexpr int kFp8ShortRow = 128;    // in eights
inline constexpr int kFp8GroupThreads = 256;
inline constexpr int kFp8GroupVectors = 2;  // per thread
inline constexpr int kFp8BlockThreads = 512;
inline constexpr int kFp8LargestThreads = 512;
inline constexpr int kFp8TensorThreads = 256;
inline constexpr int kFp8TensorVectors = 2;
inline constexpr int kFp8SmallThreads = 1024;
inline constexpr int kFp8SmallCluster = 8;

// The kernel for x's dtype with up to `vectors` eights per thread (kRow and kSmallTensor; otherwise
// 0), or null.
const Kernel* fp8_quantize_kernel(Fp8Kernel kind, DType dtype, int vectors);

}  // namespace tiercel

#endif  // KERNELS_QUANT_FP8_QUANTIZE_KERNELS_H_
