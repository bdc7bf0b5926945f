// SPDX-License-Identifier: Apache-2.0
// For scratch memory that has been read for the last time.
#ifndef KERNELS_SM90_DISCARD_CUH_
#define KERNELS_SM90_DISCARD_CUH_

namespace tiercel {

// The line of 128 bytes at `address`, a multiple of that: what it holds is undefined from here on,
// so the L2 need not write it to memory.
__device__ __forceinline__ void discard_line(const void* address) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(address) : "memory");
}

}  // namespace tiercel

#endif  // KERNELS_SM90_DISCARD_CUH_
