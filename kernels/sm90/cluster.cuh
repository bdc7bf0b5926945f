// SPDX-License-Identifier: Apache-2.0
// Thread block clusters: barriers and stores to the shared memory of the cluster's other blocks.
#ifndef KERNELS_SM90_CLUSTER_CUH_
#define KERNELS_SM90_CLUSTER_CUH_

#include <cstdint>

#include "kernels/sm90/mbarrier.cuh"

namespace tiercel {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t cluster_blocks() {
  uint32_t blocks;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}

// Only signals that this block runs; paired with cluster_wait().
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Makes this thread's earlier writes visible to threads that return from the paired cluster_wait().
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes to block `rank`'s shared memory, at the offset that `address` has in this block's. That
// block must already run and must not exit before: put a cluster barrier at both ends.
__device__ __forceinline__ void store_remote(uint32_t* address, uint32_t rank, uint32_t value) {
  const uint32_t local = shared_address(address);
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
      " st.shared::cluster.u32 [remote], %2; }" ::"r"(local),
      "r"(rank), "r"(value)
      : "memory");
}

__device__ __forceinline__ void store_remote(float* address, uint32_t rank, float value) {
  store_remote(reinterpret_cast<uint32_t*>(address), rank, __float_as_uint(value));
}

// Two and four adjacent numbers; `address` is aligned to their size.
__device__ __forceinline__ void store_remote(float2* address, uint32_t rank, float2 v) {
  const uint32_t local = shared_address(address);
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
      " st.shared::cluster.v2.f32 [remote], {%2, %3}; }" ::"r"(local),
      "r"(rank), "f"(v.x), "f"(v.y)
      : "memory");
}

__device__ __forceinline__ void store_remote(float4* address, uint32_t rank, float4 v) {
  const uint32_t local = shared_address(address);
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
      " st.shared::cluster.v4.f32 [remote], {%2, %3, %4, %5}; }" ::"r"(local),
      "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

// store_remote() that counts its bytes on the mbarrier at `barrier`'s offset in block `rank`. A
// thread that waits there needs neither a fence nor a cluster barrier.
__device__ __forceinline__ void send_remote(float4* address, uint64_t* barrier, uint32_t rank,
                                            float4 v) {
  asm volatile(
      "{ .reg .b32 remote, counter; mapa.shared::cluster.u32 remote, %0, %2;"
      " mapa.shared::cluster.u32 counter, %1, %2;"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
      " [remote], {%3, %4, %5, %6}, [counter]; }" ::"r"(shared_address(address)),
      "r"(shared_address(barrier)), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

__device__ __forceinline__ void send_remote(float2* address, uint64_t* barrier, uint32_t rank,
                                            float2 v) {
  asm volatile(
      "{ .reg .b32 remote, counter; mapa.shared::cluster.u32 remote, %0, %2;"
      " mapa.shared::cluster.u32 counter, %1, %2;"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [remote], {%3, %4}, [counter];"
      " }" ::"r"(shared_address(address)),
      "r"(shared_address(barrier)), "r"(rank), "f"(v.x), "f"(v.y)
      : "memory");
}

__device__ __forceinline__ void send_remote(float* address, uint64_t* barrier, uint32_t rank,
                                            float value) {
  asm volatile(
      "{ .reg .b32 remote, counter; mapa.shared::cluster.u32 remote, %0, %2;"
      " mapa.shared::cluster.u32 counter, %1, %2;"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [remote], %3, [counter]; }" ::"r"(
          shared_address(address)),
      "r"(shared_address(barrier)), "r"(rank), "f"(value)
      : "memory");
}

}  // namespace tiercel

#endif  // KERNELS_SM90_CLUSTER_CUH_
