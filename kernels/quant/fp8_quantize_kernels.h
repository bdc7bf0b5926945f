// SPDX-License-Identifier: Apache-2.0
// What fp8_quantize's launcher and its device code agree on.
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
  float* partial;      // per tensor: one largest magnitude a block of the first kernel
  int64_t rows;
  int64_t columns;
  int eights;      // of a row: columns / 8
  int row_blocks;  // kGroup, where it is not flat, and kBlock: blocks across
  int partials;
  int ahead;         // so many blocks ask for x before they may read it
  bool waits_last;   // rows, groups: x is older than the kernel before this one
  bool starts_next;  // rows, groups: the kernel after this one may start at once
  bool wide;         // kGroup, kTensor: all rows of q begin at multiples of 16 bytes
  bool flat;         // rows follow each other without gaps; kGroup: and hold whole groups
};

enum class Fp8Kernel {
  kRow,          // a block or a warp a row, which stays in registers
  kLongRow,      // a block a row, read twice
  kGroup,        // 8 or 16 lanes a group of 128
  kBlock,        // a block a tile of 128x128
  kLargest,      // largest magnitudes, one a block
  kTensor,       // with a scale that is known
  kSmallTensor,  // one cluster, which keeps x in registers
};

inline constexpr int kFp8RowMaxThreads = 1024;
inline constexpr int kFp8RowsOfBlock = 8;  // where each has a warp
inline constexpr int kFp8ShortRow = 128;   // eights of values
inline constexpr int kFp8GroupThreads = 256;
inline constexpr int kFp8GroupVectors = 2;  // a thread
inline constexpr int kFp8BlockThreads = 512;
inline constexpr int kFp8LargestThreads = 512;
inline constexpr int kFp8TensorThreads = 256;
inline constexpr int kFp8TensorVectors = 2;
inline constexpr int kFp8SmallThreads = 1024;
inline constexpr int kFp8SmallCluster = 8;

// The kernel for x's dtype that keeps up to `vectors` eights a thread (for kRow and kSmallTensor; 0
// otherwise); null where there is none.
const Kernel* fp8_quantize_kernel(Fp8Kernel kind, DType dtype, int vectors);

}  // namespace tiercel

#endif  // KERNELS_QUANT_FP8_QUANTIZE_KERNELS_H_
