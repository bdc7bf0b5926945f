// SPDX-License-Identifier: Apache-2.0
// Blocks of a cluster: who they are, their barrier, stores to each other's shared memory.
#ifndef KERNELS_NORM_CLUSTER_CUH_
#define KERNELS_NORM_CLUSTER_CUH_

#include <cstdint>

namespace tiercel {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t value;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
  return value;
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t value;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(value));
  return value;
}

// Also a barrier of the block: every thread arrives. Stores before it are visible after it.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Says that this block runs, nothing more.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Stores as below and counts the bytes at the mbarrier that lies where `barrier` does in that
// block: no fence is due.
__device__ __forceinline__ void send_remote(uint32_t address, uint32_t barrier, uint32_t rank,
                                            float4 v) {
  uint32_t remote, remote_barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(barrier), "r"(rank));
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(remote),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(remote_barrier)
      : "memory");
}

// Stores to where `address`, of this block's shared memory, lies in that of block `rank`.
__device__ __forceinline__ void store_remote(uint32_t address, uint32_t rank, float4 v) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(remote), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_remote(uint32_t address, uint32_t rank, float value) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
}

}  // namespace tiercel

#endif  // KERNELS_NORM_CLUSTER_CUH_
