// SPDX-License-Identifier: Apache-2.0
// To and from NVFP4: e2m1 values, 16 neighbours with one e4m3 scale.
#ifndef KERNELS_QUANT_NVFP4_H_
#define KERNELS_QUANT_NVFP4_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct Nvfp4Call {
  const TensorView* values = nullptr;  // x, or the result of q
  const TensorView* q = nullptr;
  const TensorView* scale = nullptr;
  const TensorView* global_scale = nullptr;  // or null
};

struct Nvfp4Plan {
  const char* kernel;  // "none" for an empty tensor
  int64_t grid;
  unsigned block;
};

// values [T, K] float32, bfloat16 or float16, rows of K neighbouring values at any distance; q
// [T, K / 2] pairs of e2m1, the first in the low half of the byte, contiguous; scale [T, K / 16]
// e4m3, contiguous; global_scale float32 with one element, or null for 1. K is a multiple of 16.
//   scale = e4m3(min(amax / 6 / global, 448)), q = e2m1(x * (1 / (scale * global)))
Status nvfp4_quantize_plan(const Nvfp4Call& call, Nvfp4Plan* plan);
Status nvfp4_quantize(const Nvfp4Call& call, void* stream);

//   out = q * (scale * global)
Status nvfp4_dequantize_plan(const Nvfp4Call& call, Nvfp4Plan* plan);
Status nvfp4_dequantize(const Nvfp4Call& call, void* stream);

Status nvfp4_quantize_load(int device);
Status nvfp4_dequantize_load(int device);

}  // namespace tiercel

#endif  // KERNELS_QUANT_NVFP4_H_
