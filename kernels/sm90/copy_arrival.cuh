// SPDX-License-Identifier: Apache-2.0
// Barriers that wait for copies with cp.async (async_copy.cuh).
#ifndef KERNELS_SM90_COPY_ARRIVAL_CUH_
#define KERNELS_SM90_COPY_ARRIVAL_CUH_

#include <cstdint>

#include "kernels/sm90/mbarrier.cuh"

namespace tiercel {

// Arrives at a barrier, as one thread of those that it counts, once all copies that this thread has
// started are there.
__device__ __forceinline__ void arrive_with_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

}  // namespace tiercel

#endif  // KERNELS_SM90_COPY_ARRIVAL_CUH_
