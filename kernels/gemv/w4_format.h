// SPDX-License-Identifier: Apache-2.0
// The 4-bit formats of weights, and what their kernels' arguments have in common.
#ifndef KERNELS_GEMV_W4_FORMAT_H_
#define KERNELS_GEMV_W4_FORMAT_H_

#include <cstdint>

namespace tiercel {

enum class W4Format : int {
  kNvfp4,  // e2m1, one e4m3 scale for 16 values
  kMxfp4,  // e2m1, one exponent (UE8M0) for 32 values
  kInt4,   // 0 to 15 less a zero point, one scale for 32, 64 or 128 values
};

enum class W4Activation : int { kNone, kRelu, kSilu, kGelu, kGeluTanh, kReluSquared };

// Scales [N, K / group]; zero points, if any, of the scales' dtype and shape.
struct W4Scales {
  W4Format format;
  int group_shift;  // log2 of the group
  const char* scale;
  int64_t scale_row;  // bytes
  const char* zero;   // or null: 8
  int64_t zero_row;
};

struct W4Epilogue {
  const float* global_scale;  // or null: 1
  const uint16_t* bias;       // of the result's dtype, or null
  W4Activation activation;
};

}  // namespace tiercel

#endif  // KERNELS_GEMV_W4_FORMAT_H_
