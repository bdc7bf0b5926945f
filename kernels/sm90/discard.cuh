// SPDX-License-Identifier: Apache-2.0
// For scratch memory that has been read for the last time.
#ifndef KERNELS_SM90_DISCARD_CUH_
#define KERNELS_SM90_DISCARD_CUH_

namespace tiercel {

inline constexpr int kLineBytes = 128;

// The line at `address`, a multiple of its size: what it holds is undefined from here on, so the L2
// need not write it to memory.
__device__ __forceinline__ void discard_line(const void* address) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(address) : "memory");
}

}  // namespace tiercel

#endif  // KERNELS_SM90_DISCARD_CUH_
