// SPDX-License-Identifier: Apache-2.0
// What the launchers of nvfp4_quantize and nvfp4_dequantize and their device code agree on.
#ifndef KERNELS_QUANT_NVFP4_KERNELS_H_
#define KERNELS_QUANT_NVFP4_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct Nvfp4Args {
  char* values;               // x, or what is made of q
  int64_t row_bytes;          // from one row of values to the next
  char* q;                    // contiguous
  char* scale;                // contiguous
  const float* global_scale;  // or null: 1
  int64_t groups;             // of all rows; a group has 16 values
  int row_groups;             // of one row
  int ahead;                  // so many blocks ask for their data before they may read it
  bool flat;                  // rows of values follow each other without gaps
};

inline constexpr int kNvfp4QuantizeThreads = 256;  // a thread has a group
inline constexpr int kNvfp4DequantizeThreads = 128;
inline constexpr int kNvfp4Halves = 2;  // of groups, a thread that dequantises

const Kernel* nvfp4_quantize_kernel(DType dtype);
const Kernel* nvfp4_dequantize_kernel(DType dtype);

}  // namespace tiercel

#endif  // KERNELS_QUANT_NVFP4_KERNELS_H_
