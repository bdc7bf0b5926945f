// SPDX-License-Identifier: Apache-2.0
// A row of the table that the build generates from a family's CuTe DSL kernels (tools/cute).
#ifndef KERNELS_SM90_CUBIN_KERNEL_H_
#define KERNELS_SM90_CUBIN_KERNEL_H_

#include <cstdint>

#include "kernels/sm90/cubin.h"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_map.h"

namespace tiercel {

inline constexpr int kCubinKernelMaxMaps = 6;

// Variant is the family's: the values that its heuristic chooses by.
template <typename Variant>
struct CubinKernel {
  Variant variant;
  TensorMapSpec maps[kCubinKernelMaxMaps];  // in the order of the kernel's parameters
  uint32_t block;
  uint32_t dynamic_smem;
  bool dependent;
  Kernel kernel;
};

}  // namespace tiercel

#endif  // KERNELS_SM90_CUBIN_KERNEL_H_
