// SPDX-License-Identifier: Apache-2.0
// Matrix times vector, both in NVFP4.
#ifndef KERNELS_GEMV_NVFP4_GEMV_H_
#define KERNELS_GEMV_NVFP4_GEMV_H_

#include "kernels/sm90/status.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// What a call would launch.
struct Nvfp4GemvPlan {
  const char* kernel;  // "none" for an empty batch
  int rows_per_block;
  int parts;  // warps that share four rows, along K
  unsigned grid;
  unsigned block;
  unsigned dynamic_smem;
};

// The seven tensors of the op's contract.
struct Nvfp4GemvCall {
  const TensorView* a = nullptr;        // [m, k / 2, l] pairs of e2m1
  const TensorView* b = nullptr;        // [1, k / 2, l]
  const TensorView* scale_a = nullptr;  // [m, k / 16, l] e4m3, on the CPU, not read
  const TensorView* scale_b = nullptr;  // [1, k / 16, l]
  // The same on the GPU, padded: [32, 4, ceil(m / 128), 4, ceil(k / 64), l], in memory by batch,
  // atom of rows, atom of K, row of 32, row / 32 of 4, scale of 4.
  const TensorView* scale_a_permuted = nullptr;
  const TensorView* scale_b_permuted = nullptr;  // [32, 4, 1, 4, ceil(k / 64), l]
  const TensorView* c = nullptr;                 // [m, 1, l] float16, any strides
};

// All checks and the choice of configuration; needs no GPU and no driver.
Status nvfp4_gemv_plan(const Nvfp4GemvCall& call, Nvfp4GemvPlan* plan);

// The same, then the launch.
Status nvfp4_gemv(const Nvfp4GemvCall& call, void* stream);

Status nvfp4_gemv_load(int device);

}  // namespace tiercel

#endif  // KERNELS_GEMV_NVFP4_GEMV_H_
