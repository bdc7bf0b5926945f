// SPDX-License-Identifier: Apache-2.0
// The interface of the host and device code of nvfp4_quantize and nvfp4_dequantize.
#ifndef KERNELS_QUANT_NVFP4_KERNELS_H_
#define KERNELS_QUANT_NVFP4_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct Nvfp4Args {
  char* values;               // x, or dequantised q
  int64_t row_bytes;          // from one row of values to the next
  char* q;                    // contiguous
  char* scale;                // contiguous
  const float* global_scale;  // or null: 1
  int64_t groups;             // in all rows; a group has 16 values
  int row_groups;             // per row
  int prefetch_blocks;        // blocks that prefetch their data to L2 before they may read it
  bool flat;                  // no gaps between the rows of values
};

inline constexpr int kNvfp4QuantizeThreads = 256;  // a group per thread
inline constexpr int kNvfp4DequantizeThreads = 128;
inline constexpr int kNvfp4Halves = 2;  // of groups, per dequantising thread

const Kernel* nvfp4_quantize_kernel(DType dtype);
const Kernel* nvfp4_dequantize_kernel(DType dtype);

}  // namespace tiercel

#endif  // KERNELS_QUANT_NVFP4_KERNELS_H_
