// SPDX-License-Identifier: Apache-2.0
// What a grid's first blocks do while they wait for the grid before: bring their data to the L2.
#ifndef KERNELS_ROTARY_AHEAD_CUH_
#define KERNELS_ROTARY_AHEAD_CUH_

#include <cstdint>

namespace tiercel {

// A hint, which reads nothing: the grid before this one may still write at `address`.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Whether this block is one of the grid's first.
__device__ __forceinline__ bool is_ahead(int blocks) {
  return static_cast<int>(blockIdx.y * gridDim.x + blockIdx.x) < blocks;
}

}  // namespace tiercel

#endif  // KERNELS_ROTARY_AHEAD_CUH_
