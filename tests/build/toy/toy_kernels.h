// SPDX-License-Identifier: Apache-2.0
// The interface of toy_shift's host and device code.
#ifndef KERNELS_TOY_TOY_KERNELS_H_
#define KERNELS_TOY_TOY_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"

namespace tiercel {

struct ToyShiftArgs {
  const float* x;
  float* out;
  int64_t count;
  float amount;
};

struct ToyShiftKernel {
  Kernel kernel;
};

const ToyShiftKernel* toy_shift_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_TOY_TOY_KERNELS_H_
