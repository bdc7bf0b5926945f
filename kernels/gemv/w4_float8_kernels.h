// SPDX-License-Identifier: Apache-2.0
// The interface of w4_linear's host and device code for activations of e4m3.
#ifndef KERNELS_GEMV_W4_FLOAT8_KERNELS_H_
#define KERNELS_GEMV_W4_FLOAT8_KERNELS_H_

#include "kernels/gemv/w4_tiles_kernels.h"

namespace tiercel {

struct W4Float8Args {
  W4TilesArgs tile;      // boxes of x have 128 values
  const float* x_scale;  // of the tokens
  int x_scale_step;      // 1, or 0 for one scale of all tokens
  bool float16_scales;   // int4's scales and zero points are float16, else bfloat16
};

struct W4Float8Kernel {
  int tokens;   // of a block
  bool floats;  // e2m1 weights; else whole numbers
  int group;    // of whole numbers: sums are scaled after so many values of K
  int together;
  int stages;
  Kernel kernel;
};

inline constexpr int kW4Float8MaxShared = 224 * 1024;  // with 3 KiB of scales and tables

const W4Float8Kernel* w4_float8_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_GEMV_W4_FLOAT8_KERNELS_H_
