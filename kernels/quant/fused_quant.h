// SPDX-License-Identifier: Apache-2.0
// To e4m3 by the kernel that computes the values: a norm, or a gated activation.
#ifndef KERNELS_QUANT_FUSED_QUANT_H_
#define KERNELS_QUANT_FUSED_QUANT_H_

#include "kernels/quant/fp8_quantize.h"
#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// In the order of FusedQuantKernel's producers.
enum class GatedFunction { kSilu, kGelu, kGeluTanh, kRelu };

struct FusedQuantCall {
  const TensorView* x = nullptr;         // [T, N], or [T, 2N] with gates, then factors
  const TensorView* q = nullptr;         // [T, N] e4m3, contiguous
  const TensorView* scale = nullptr;     // as in fp8_quantize; read with kTensor, else written
  const TensorView* weight = nullptr;    // norm: [N] float32 or x's dtype, or null
  const TensorView* bias = nullptr;      // layer norm: likewise
  const TensorView* residual = nullptr;  // norm: [T, N], becomes x + residual; or null
  const TensorView* normed = nullptr;    // norm: [T, N] of x's dtype for the values, or null
  Fp8Granularity granularity = Fp8Granularity::kRow;  // not kBlock
  GatedFunction function = GatedFunction::kSilu;      // gated
  double eps = 0.0;                                   // norm
};

struct FusedQuantPlan {
  const char* kernel;  // "none" for an empty tensor
  int vectors;         // of eight values that a thread keeps
  int64_t grid;
  unsigned block;
};

// x is bfloat16 or float16; the values are float32 and not rounded before they are quantised, as by
// fp8_quantize.
//   rms_norm_quant: value = x / sqrt(mean(x^2) + eps) * weight, of x + residual if there is one
//   layer_norm_quant: value = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, likewise
//   act_and_mul_quant: value = function(gate) * factor
Status rms_norm_quant_plan(const FusedQuantCall& call, FusedQuantPlan* plan);
Status rms_norm_quant(const FusedQuantCall& call, void* stream);
Status layer_norm_quant_plan(const FusedQuantCall& call, FusedQuantPlan* plan);
Status layer_norm_quant(const FusedQuantCall& call, void* stream);
Status act_and_mul_quant_plan(const FusedQuantCall& call, FusedQuantPlan* plan);
Status act_and_mul_quant(const FusedQuantCall& call, void* stream);

// Loads the kernels of all three on a device.
Status fused_quant_load(int device);

}  // namespace tiercel

#endif  // KERNELS_QUANT_FUSED_QUANT_H_
