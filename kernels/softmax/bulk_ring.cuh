// SPDX-License-Identifier: Apache-2.0
// Parts of rows that the bulk-copy engine brings to shared memory, some rows ahead of the threads.
#ifndef KERNELS_SOFTMAX_BULK_RING_CUH_
#define KERNELS_SOFTMAX_BULK_RING_CUH_

#include <cstdint>

namespace tiercel {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// One barrier a stage; a stage is full when all the bytes that were announced have come.
struct BulkRing {
  uint64_t* full;  // in shared memory, one a stage
  char* stages;    // in shared memory
  uint32_t stage_bytes;
  uint32_t count;

  // By all threads; by the end every thread may wait.
  __device__ __forceinline__ void start() const {
    if (threadIdx.x == 0) {
      for (uint32_t s = 0; s < count; ++s) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[s]))
                     : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
  }

  // By one thread: what a turn's copies will bring in all.
  __device__ __forceinline__ void announce(uint32_t turn, uint32_t bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(&full[turn % count])),
                 "r"(bytes)
                 : "memory");
  }

  // By one thread; `bytes`, `offset` and the address are multiples of 16.
  __device__ __forceinline__ void load(uint32_t turn, uint32_t offset, const char* from,
                                       uint32_t bytes) const {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(stage(turn)) + offset),
        "l"(from), "r"(bytes), "r"(shared_address(&full[turn % count]))
        : "memory");
  }

  __device__ __forceinline__ void wait(uint32_t turn) const {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_address(&full[turn % count])),
        "r"(turn / count & 1)
        : "memory");
  }

  __device__ __forceinline__ const char* stage(uint32_t turn) const {
    return stages + turn % count * stage_bytes;
  }
};

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_BULK_RING_CUH_
