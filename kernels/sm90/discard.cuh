// SPDX-License-Identifier: Apache-2.0
// Discards scratch memory after its last read.
#ifndef KERNELS_SM90_DISCARD_CUH_
#define KERNELS_SM90_DISCARD_CUH_

namespace tiercel {

// Makes the 128-byte line at `address` (128-byte aligned) undefined, so that L2 need not write it
// back to memory.
__device__ __forceinline__ void discard_line(const void* address) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(address) : "memory");
}

}  // namespace tiercel

#endif  // KERNELS_SM90_DISCARD_CUH_
