// SPDX-License-Identifier: Apache-2.0
// The threads that share a row: some lanes of a warp, a block, or a cluster of blocks.
#ifndef KERNELS_SOFTMAX_ROW_GROUP_CUH_
#define KERNELS_SOFTMAX_ROW_GROUP_CUH_

#include <cstdint>

#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

inline constexpr float kInfinity = __builtin_huge_valf();

// Both give NaN where an operand is NaN or where nothing else can be right later: fmaxf passes over
// NaN, but then the sum of exponentials has it.
struct MaxOf {
  static constexpr float kNeutral = -kInfinity;
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct SumOf {
  static constexpr float kNeutral = 0.0f;
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// kLanes lanes of a warp, 1 to 32: several rows a warp.
template <int kLanes>
struct LaneGroup {
  __device__ __forceinline__ explicit LaneGroup(uint32_t) {}
  __device__ __forceinline__ int64_t row() const {
    return static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  }
  __device__ __forceinline__ uint32_t rank() const { return threadIdx.x % kLanes; }
  __device__ __forceinline__ uint32_t size() const { return kLanes; }
  __device__ __forceinline__ void meet() const {}
  template <typename Op>
  __device__ __forceinline__ float reduce(float value, Op op, int) const {
    return lanes_reduce<kLanes>(value, op);
  }
};

// A block, or a cluster of them in x.
struct BlockGroup {
  __device__ __forceinline__ explicit BlockGroup(uint32_t blocks) : blocks_(blocks) {
    if (blocks_ > 1) cluster_arrive_relaxed();
  }
  __device__ __forceinline__ int64_t row() const { return blockIdx.x / blocks_; }
  __device__ __forceinline__ uint32_t rank() const {
    return blocks_ > 1 ? cluster_rank() * blockDim.x + threadIdx.x : threadIdx.x;
  }
  __device__ __forceinline__ uint32_t size() const { return blocks_ * blockDim.x; }

  // Once, before the first reduction: it writes to other blocks, which have to run by then.
  __device__ __forceinline__ void meet() const {
    if (blocks_ > 1) cluster_wait();
  }

  // The online softmax's reduction, of a maximum and a sum of exponentials below it that are a
  // warp's already: both of all threads, with one barrier. `scale(x, y)`: exp(x - y), as scaled.
  template <typename Scale>
  __device__ __forceinline__ float2 join(float largest, float sum, Scale scale) const {
    __shared__ float2 of_warps[32];
    __shared__ float2 of_blocks[kMaxBlocks];
    const uint32_t lane = threadIdx.x % 32;
    if (lane == 0) of_warps[threadIdx.x / 32] = make_float2(largest, sum);
    __syncthreads();
    const float2 none = make_float2(-kInfinity, 0.0f);
    const float2 all = join_lanes(lane < blockDim.x / 32 ? of_warps[lane] : none, scale);
    if (blocks_ == 1) return all;
    if (threadIdx.x < blocks_) {
      store_remote(&of_blocks[cluster_rank()], threadIdx.x, all);
    }
    cluster_arrive();
    cluster_wait();
    return join_lanes(lane < blocks_ ? of_blocks[lane] : none, scale);
  }

  // Over all threads; each gets the same bits. `slot` is 0 or 1, in turn: between two uses of one
  // slot the other's barrier makes sure that all have read it.
  template <typename Op>
  __device__ __forceinline__ float reduce(float value, Op op, int slot) const {
    __shared__ float of_warps[2][32];
    __shared__ uint32_t of_blocks[2][kMaxBlocks];
    const uint32_t lane = threadIdx.x % 32;
    value = lanes_reduce<32>(value, op);
    if (lane == 0) of_warps[slot][threadIdx.x / 32] = value;
    __syncthreads();
    value = lanes_reduce<32>(lane < blockDim.x / 32 ? of_warps[slot][lane] : Op::kNeutral, op);
    if (blocks_ == 1) return value;
    if (threadIdx.x < blocks_) {
      store_remote(&of_blocks[slot][cluster_rank()], threadIdx.x, __float_as_uint(value));
    }
    cluster_arrive();
    cluster_wait();
    // Each half of the warp reduces all of them.
    const uint32_t block = lane % kMaxBlocks;
    const float other = block < blocks_ ? __uint_as_float(of_blocks[slot][block]) : Op::kNeutral;
    return lanes_reduce<kMaxBlocks>(other, op);
  }

 private:
  template <typename Scale>
  static __device__ __forceinline__ float2 join_lanes(float2 mine, Scale scale) {
    const float largest = lanes_reduce<32>(mine.x, MaxOf());
    return make_float2(largest, lanes_reduce<32>(mine.y * scale(mine.x, largest), SumOf()));
  }

  static constexpr int kMaxBlocks = 16;
  uint32_t blocks_;
};

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_ROW_GROUP_CUH_
