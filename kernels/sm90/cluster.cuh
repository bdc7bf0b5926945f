// SPDX-License-Identifier: Apache-2.0
// Thread block clusters: barriers and stores to the shared memory of the cluster's other blocks.
#ifndef KERNELS_SM90_CLUSTER_CUH_
#define KERNELS_SM90_CLUSTER_CUH_

#include <cstdint>

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

// Says that this block runs, nothing more; paired with cluster_wait().
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// What this thread wrote before is visible to whoever returns from the paired cluster_wait().
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes to the place that `address` (in this block's shared memory) is in block `rank`'s. That
// block must run (a first barrier) and must not end before it (a last one).
__device__ __forceinline__ void store_remote(uint32_t* address, uint32_t rank, uint32_t value) {
  const uint32_t local = static_cast<uint32_t>(__cvta_generic_to_shared(address));
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
      " st.shared::cluster.u32 [remote], %2; }" ::"r"(local),
      "r"(rank), "r"(value)
      : "memory");
}

__device__ __forceinline__ void store_remote(float* address, uint32_t rank, float value) {
  store_remote(reinterpret_cast<uint32_t*>(address), rank, __float_as_uint(value));
}

// The same for two and four numbers side by side; `address` is a multiple of their size.
__device__ __forceinline__ void store_remote(float2* address, uint32_t rank, float2 v) {
  const uint32_t local = static_cast<uint32_t>(__cvta_generic_to_shared(address));
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
      " st.shared::cluster.v2.f32 [remote], {%2, %3}; }" ::"r"(local),
      "r"(rank), "f"(v.x), "f"(v.y)
      : "memory");
}

__device__ __forceinline__ void store_remote(float4* address, uint32_t rank, float4 v) {
  const uint32_t local = static_cast<uint32_t>(__cvta_generic_to_shared(address));
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
      " st.shared::cluster.v4.f32 [remote], {%2, %3, %4, %5}; }" ::"r"(local),
      "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

// As the last of these, and counts the bytes at the mbarrier that is where `barrier` is in that
// block: whoever waits there needs no other fence and no barrier of the cluster.
__device__ __forceinline__ void send_remote(float4* address, uint64_t* barrier, uint32_t rank,
                                            float4 v) {
  asm volatile(
      "{ .reg .b32 remote, counter; mapa.shared::cluster.u32 remote, %0, %2;"
      " mapa.shared::cluster.u32 counter, %1, %2;"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
      " [remote], {%3, %4, %5, %6}, [counter]; }" ::"r"(
          static_cast<uint32_t>(__cvta_generic_to_shared(address))),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))), "r"(rank), "f"(v.x), "f"(v.y),
      "f"(v.z), "f"(v.w)
      : "memory");
}

__device__ __forceinline__ void send_remote(float2* address, uint64_t* barrier, uint32_t rank,
                                            float2 v) {
  asm volatile(
      "{ .reg .b32 remote, counter; mapa.shared::cluster.u32 remote, %0, %2;"
      " mapa.shared::cluster.u32 counter, %1, %2;"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [remote], {%3, %4}, [counter];"
      " }" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(address))),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))), "r"(rank), "f"(v.x), "f"(v.y)
      : "memory");
}

__device__ __forceinline__ void send_remote(float* address, uint64_t* barrier, uint32_t rank,
                                            float value) {
  asm volatile(
      "{ .reg .b32 remote, counter; mapa.shared::cluster.u32 remote, %0, %2;"
      " mapa.shared::cluster.u32 counter, %1, %2;"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [remote], %3, [counter]; }" ::"r"(
          static_cast<uint32_t>(__cvta_generic_to_shared(address))),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))), "r"(rank), "f"(value)
      : "memory");
}

}  // namespace tiercel

#endif  // KERNELS_SM90_CLUSTER_CUH_
