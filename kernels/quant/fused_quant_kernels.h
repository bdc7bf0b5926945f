// SPDX-License-Identifier: Apache-2.0
// The interface of the host and device code of rms_norm_quant, layer_norm_quant and
// act_and_mul_quant.
#ifndef KERNELS_QUANT_FUSED_QUANT_KERNELS_H_
#define KERNELS_QUANT_FUSED_QUANT_KERNELS_H_

#include <cstdint>

#include "kernels/quant/fused_quant.h"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct FusedQuantArgs {
  const char* x;
  const char* factors;  // gated: of the first row
  int64_t row_bytes;    // from one row of x to the next
  char* residual;       // or null
  int64_t residual_row_bytes;
  char* normed;        // or null; contiguous
  char* q;             // contiguous
  float* scale;        // contiguous
  const char* weight;  // or null
  const char* bias;    // or null
  int64_t columns;
  int vectors;  // per row: columns / 8
  int groups;   // per row
  float inverse_columns;
  float eps;
  Fp8Granularity granularity;
  int prefetch_blocks;  // blocks that prefetch their data to L2 before they may read it
  bool wide_weight;     // float32
  bool wide_bias;
};

enum class FusedQuantProducer { kRmsNorm, kLayerNorm, kSilu, kGelu, kGeluTanh, kRelu };

struct FusedQuantKernel {
  FusedQuantProducer producer;
  DType dtype;
  int vectors;  // at most, per thread
  Kernel kernel;
};

inline constexpr int kFusedQuantMostThreads = 1024;

const FusedQuantKernel* fused_quant_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_QUANT_FUSED_QUANT_KERNELS_H_
