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
inline constexpr int kCubinKernelMaxParameters = 64;  // of kernels with a struct of arguments

// Variant is the family's: the values that its heuristic chooses by.
template <typename Variant>
struct CubinKernel {
  Variant variant;
  TensorMapSpec maps[kCubinKernelMaxMaps];  // in the order of the kernel's parameters
  uint32_t block;
  uint32_t dynamic_smem;
  bool dependent;
  Kernel kernel;
  // The offset of each parameter in the family's argument struct; null for a family without one.
  const uint16_t* members = nullptr;
  int member_count = 0;

  // `arguments` points to that struct. Its members have the names of the kernel's parameters, by
  // which the build binds them, so their order does not matter.
  Status launch(const LaunchConfig& config, int device, void* stream, void* arguments) const {
    void* args[kCubinKernelMaxParameters];
    for (int i = 0; i < member_count; ++i) args[i] = static_cast<char*>(arguments) + members[i];
    return kernel.launch(config, device, stream, args);
  }
};

}  // namespace tiercel

#endif  // KERNELS_SM90_CUBIN_KERNEL_H_
