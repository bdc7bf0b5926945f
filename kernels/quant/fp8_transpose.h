// SPDX-License-Identifier: Apache-2.0
// To e4m3, as it lies in memory and transposed, in one pass.
#ifndef KERNELS_QUANT_FP8_TRANSPOSE_H_
#define KERNELS_QUANT_FP8_TRANSPOSE_H_

#include "kernels/quant/fp8_quantize.h"
#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct Fp8TransposeCall {
  const TensorView* x = nullptr;
  const TensorView* q = nullptr;
  const TensorView* scale = nullptr;
  const TensorView* q_t = nullptr;
  const TensorView* scale_t = nullptr;
  Fp8Granularity granularity = Fp8Granularity::kGroup;  // or kBlock
};

struct Fp8TransposePlan {
  const char* kernel;  // "none" for an empty tensor
  int64_t grid;
  unsigned block;
};

// x [T, K] float32, bfloat16 or float16, rows of K neighbouring values at any distance, K a
// multiple of 8. With P = T rounded up to a multiple of 128, all results contiguous:
//   kGroup: q [T, K] and scale [T, ceil(K / 128)] as of fp8_quantize(x); q_t [K, P] and
//     scale_t [P / 128, K] as of fp8_quantize of the transpose of x, with rows of zeros up to P.
//   kBlock: q and scale [P / 128, ceil(K / 128)] as of fp8_quantize(x); q_t and
//     scale_t [ceil(K / 128), P / 128] are their transposes.
Status fp8_quantize_transpose_plan(const Fp8TransposeCall& call, Fp8TransposePlan* plan);
Status fp8_quantize_transpose(const Fp8TransposeCall& call, void* stream);

// Loads its kernels on a device.
Status fp8_quantize_transpose_load(int device);

}  // namespace tiercel

#endif  // KERNELS_QUANT_FP8_TRANSPOSE_H_
