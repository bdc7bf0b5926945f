// SPDX-License-Identifier: Apache-2.0
// Loads from the shared memory of the cluster's other blocks; cluster.cuh has the stores.
#ifndef KERNELS_SM90_LOAD_REMOTE_CUH_
#define KERNELS_SM90_LOAD_REMOTE_CUH_

#include <cstdint>

#include "kernels/sm90/mbarrier.cuh"

namespace tiercel {

// Reads block `rank`'s shared memory, at the offset that `address` has in this block's. That block
// must already run and must not exit before: put a cluster barrier at both ends.
__device__ __forceinline__ uint32_t load_remote(const uint32_t* address, uint32_t rank) {
  uint32_t value;
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %1, %2;"
      " ld.shared::cluster.u32 %0, [remote]; }"
      : "=r"(value)
      : "r"(shared_address(address)), "r"(rank)
      : "memory");
  return value;
}

__device__ __forceinline__ float load_remote(const float* address, uint32_t rank) {
  float value;
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %1, %2;"
      " ld.shared::cluster.f32 %0, [remote]; }"
      : "=f"(value)
      : "r"(shared_address(address)), "r"(rank)
      : "memory");
  return value;
}

// Four adjacent numbers; `address` is aligned to 16 bytes.
__device__ __forceinline__ float4 load_remote(const float4* address, uint32_t rank) {
  float4 v;
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %4, %5;"
      " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote]; }"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(shared_address(address)), "r"(rank)
      : "memory");
  return v;
}

}  // namespace tiercel

#endif  // KERNELS_SM90_LOAD_REMOTE_CUH_
