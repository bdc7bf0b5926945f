// SPDX-License-Identifier: Apache-2.0
// The threads that share a row: some lanes of a warp, a block, or a cluster of blocks.
#ifndef KERNELS_SOFTMAX_ROW_GROUP_CUH_
#define KERNELS_SOFTMAX_ROW_GROUP_CUH_

#include <cstdint>

#include "kernels/sm90/reduce.cuh"

namespace tiercel {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes two floats to the same place of shared memory in another block of the cluster.
__device__ __forceinline__ void store_to_block(float2* local, uint32_t rank, float2 value) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
      "  st.shared::cluster.v2.f32 [remote], {%2, %3}; }" ::"r"(address),
      "r"(rank), "f"(value.x), "f"(value.y)
      : "memory");
}

// kLanes lanes of a warp, 1 to 32: several rows a warp.
template <int kLanes>
struct LaneGroup {
  static constexpr bool kBlocks = false;

  __device__ __forceinline__ explicit LaneGroup(uint32_t) {}
  __device__ __forceinline__ int64_t row() const {
    return static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  }
  __device__ __forceinline__ uint32_t rank() const { return threadIdx.x % kLanes; }
  __device__ __forceinline__ uint32_t size() const { return kLanes; }
  // Between lanes that shuffle together.
  template <typename Op>
  __device__ __forceinline__ float near(float value, Op op) const {
    return lanes_reduce<kLanes>(value, op);
  }
  // Of the pairs that `near` made; `merge` is associative and commutative.
  template <typename Merge>
  __device__ __forceinline__ float2 far(float2 pair, float2, Merge) const {
    return pair;
  }
};

// A block, or a cluster of them in x; one row.
struct BlockGroup {
  static constexpr bool kBlocks = true;

  __device__ __forceinline__ explicit BlockGroup(uint32_t blocks) : blocks_(blocks) {
    // Before one writes to another's shared memory that block has to run.
    if (blocks_ > 1) cluster_arrive();
  }
  __device__ __forceinline__ int64_t row() const { return blockIdx.x / blocks_; }
  __device__ __forceinline__ uint32_t rank() const {
    return blocks_ > 1 ? cluster_rank() * blockDim.x + threadIdx.x : threadIdx.x;
  }
  __device__ __forceinline__ uint32_t size() const { return blocks_ * blockDim.x; }
  template <typename Op>
  __device__ __forceinline__ float near(float value, Op op) const {
    return lanes_reduce<32>(value, op);
  }
  // Every thread gets the same bits. Once a kernel.
  template <typename Merge>
  __device__ __forceinline__ float2 far(float2 pair, float2 neutral, Merge merge) const {
    __shared__ float2 of_warps[32];
    __shared__ float2 of_blocks[16];
    const uint32_t lane = threadIdx.x % 32;
    if (lane == 0) of_warps[threadIdx.x / 32] = pair;
    __syncthreads();
    pair = all_lanes(lane < blockDim.x / 32 ? of_warps[lane] : neutral, merge);
    if (blocks_ == 1) return pair;
    cluster_wait();
    if (threadIdx.x < blocks_) store_to_block(&of_blocks[cluster_rank()], threadIdx.x, pair);
    cluster_arrive();
    cluster_wait();
    return all_lanes(lane < blocks_ ? of_blocks[lane] : neutral, merge);
  }

  // Of a warp's pairs.
  template <typename Merge>
  static __device__ __forceinline__ float2 all_lanes(float2 pair, Merge merge) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      float2 other;
      other.x = __shfl_xor_sync(kFullWarp, pair.x, offset);
      other.y = __shfl_xor_sync(kFullWarp, pair.y, offset);
      pair = merge(pair, other);
    }
    return pair;
  }

 private:
  uint32_t blocks_;
};

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_ROW_GROUP_CUH_
