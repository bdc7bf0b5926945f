// SPDX-License-Identifier: Apache-2.0
// What a grid's first blocks do while they wait for the grid before: bring their data to the L2.
#ifndef KERNELS_SM90_AHEAD_H_
#define KERNELS_SM90_AHEAD_H_

#include <cstdint>

#include "kernels/sm90/launch.h"

namespace tiercel {

// Blocks that an H200 holds at once, if their threads alone limit it.
inline int first_blocks(const Dim3& block) {
  return 132 * 2048 / static_cast<int>(block.x * block.y * block.z);
}

#ifdef __CUDACC__
// A hint, which reads nothing: the grid before this one may still write at `address`.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Line `number`, if there is one, of `bytes` that one block after another will need.
__device__ __forceinline__ void prefetch_line(const void* begin, int64_t number, int64_t bytes) {
  if (number * 128 < bytes) prefetch_l2(static_cast<const char*>(begin) + number * 128);
}

// Whether this block is one of the grid's first.
__device__ __forceinline__ bool is_ahead(int blocks) {
  return static_cast<int>(blockIdx.y * gridDim.x + blockIdx.x) < blocks;
}
#endif

}  // namespace tiercel

#endif  // KERNELS_SM90_AHEAD_H_
