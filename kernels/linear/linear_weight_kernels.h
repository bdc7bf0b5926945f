// SPDX-License-Identifier: Apache-2.0
// The interface of linear_weight's host code and its compiled kernels (weight_cute.py).
#ifndef KERNELS_LINEAR_LINEAR_WEIGHT_KERNELS_H_
#define KERNELS_LINEAR_LINEAR_WEIGHT_KERNELS_H_

#include "kernels/linear/linear_weight.h"
#include "kernels/sm90/cubin_kernel.h"

namespace tiercel {

// The values of linear_weight_cute.py.
enum class WeightResult { kFloat32, kFloat32Added, kBFloat16 };

struct LinearWeightVariant {
  int tile_m;
  int tile_n;
  int cluster;  // blocks, with tiles one below the other
};

using LinearWeightKernel = CubinKernel<LinearWeightVariant>;

// All compiled kernels.
const CubinKernel<LinearWeightVariant>* linear_weight_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_LINEAR_LINEAR_WEIGHT_KERNELS_H_
