// SPDX-License-Identifier: Apache-2.0
// Prefetches to L2 by the blocks that become resident while the previous grid still runs.
#ifndef KERNELS_SM90_PREFETCH_H_
#define KERNELS_SM90_PREFETCH_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/math.h"

namespace tiercel {

// Blocks resident at once on an H100 SXM or H200, limited by threads alone.
inline int resident_blocks(const Dim3& block) {
  return kDefaultMultiprocessors * 2048 / static_cast<int>(block.x * block.y * block.z);
}

#ifdef __CUDACC__
// Only a hint: the previous grid may still write at `address`.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Prefetches 128-byte line `number` of `bytes`, if that many lines exist.
__device__ __forceinline__ void prefetch_line(const void* begin, int64_t number, int64_t bytes) {
  if (number * 128 < bytes) prefetch_l2(static_cast<const char*>(begin) + number * 128);
}

// True for the first `blocks` blocks of the grid.
__device__ __forceinline__ bool is_prefetching(int blocks) {
  return static_cast<int>(blockIdx.y * gridDim.x + blockIdx.x) < blocks;
}
#endif

}  // namespace tiercel

#endif  // KERNELS_SM90_PREFETCH_H_
