// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory that a thread issues and later waits for (cp.async).
#ifndef KERNELS_SM90_ASYNC_COPY_CUH_
#define KERNELS_SM90_ASYNC_COPY_CUH_

#include <cstdint>

namespace tiercel {

// Copies 16 bytes, bypassing L1; writes zeros and reads nothing if `real` is false.
__device__ __forceinline__ void async_copy_16(uint32_t shared, const void* global, bool real) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(real ? 16 : 0)
               : "memory");
}

// Copies 4 bytes through L1; writes zeros and reads nothing if `real` is false.
__device__ __forceinline__ void async_copy_4(uint32_t shared, const void* global, bool real) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global),
               "r"(real ? 4 : 0)
               : "memory");
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void async_copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's latest groups are in flight.
template <int kPending>
__device__ __forceinline__ void async_copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace tiercel

#endif  // KERNELS_SM90_ASYNC_COPY_CUH_
