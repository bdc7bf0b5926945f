// SPDX-License-Identifier: Apache-2.0
// The threads that share a row: some lanes of a warp, a block, or a cluster of blocks.
#ifndef KERNELS_SOFTMAX_ROW_GROUP_CUH_
#define KERNELS_SOFTMAX_ROW_GROUP_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/softmax/softmax_kernels.h"

namespace tiercel {

inline constexpr float kInfinity = __builtin_huge_valf();

// fmaxf ignores NaN, but the sum of exponentials then has it, so the row's results are NaN.
struct MaxOf {
  static constexpr float kNeutral = -kInfinity;
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct SumOf {
  static constexpr float kNeutral = 0.0f;
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// Reduces each group of kLanes lanes. A whole warp's maximum is one instruction on integers in the
// floats' order. A NaN orders beyond the infinities there, which also makes the row NaN.
template <int kLanes, typename Op>
__device__ __forceinline__ float group_reduce(float value, Op op) {
  if constexpr (kLanes == 32 && std::is_same_v<Op, MaxOf>) {
    const int bits = __float_as_int(value);
    const int most = __reduce_max_sync(kFullWarp, bits ^ (bits >> 31 & 0x7fffffff));
    return __int_as_float(most ^ (most >> 31 & 0x7fffffff));
  } else {
    return lanes_reduce<kLanes>(value, op);
  }
}

// kLanes lanes of a warp, 1 to 32; several rows per warp.
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
    return group_reduce<kLanes>(value, op);
  }
};

// A block, or a cluster of blocks in x. Blocks write to each other's shared memory and count on an
// mbarrier there, because a cluster barrier is also a fence that waits for all memory accesses.
struct BlockGroup {
  __device__ __forceinline__ explicit BlockGroup(uint32_t blocks) : blocks_(blocks) {
    if (blocks_ == 1) return;
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < kSlots; ++slot) {
        mbarrier_init(&shared().arrived[slot], 1);
        mbarrier_expect(&shared().arrived[slot], warps() * sizeof(float2));
      }
      mbarrier_init_fence();
    }
    __syncwarp();
    cluster_arrive_relaxed();
  }
  __device__ __forceinline__ int64_t row() const { return blockIdx.x / blocks_; }
  __device__ __forceinline__ uint32_t rank() const {
    return blocks_ > 1 ? cluster_rank() * blockDim.x + threadIdx.x : threadIdx.x;
  }
  __device__ __forceinline__ uint32_t size() const { return blocks_ * blockDim.x; }

  // Called once, before the first reduction, which writes to other blocks: these must already run.
  // A block may exit before the others, because by then it has received their values.
  __device__ __forceinline__ void meet() const {
    if (blocks_ > 1) cluster_wait();
  }

  // The online softmax's reduction of a warp's maximum and its sum of exponentials over all
  // threads. `scale(x, y)` is the scaled exp(x - y).
  template <typename Scale>
  __device__ __forceinline__ float2 join(float largest, float sum, Scale scale) const {
    return join_all(exchange(make_float2(largest, sum), 0), warps(), scale);
  }

  // Reduces the pairs of all warps.
  template <typename Scale>
  static __device__ __forceinline__ float2 join_all(const float2* all, uint32_t warps,
                                                    Scale scale) {
    // Each group of `span` lanes reads all pairs.
    const uint32_t span = warps > 16 ? 32 : warps > 8 ? 16 : warps > 4 ? 8 : 4;
    const uint32_t first = threadIdx.x % span;
    float largest = -kInfinity, sum = 0.0f;
#pragma unroll 1
    for (uint32_t w = first; w < warps; w += span) largest = fmaxf(largest, all[w].x);
    largest = group_reduce<32>(largest, MaxOf());
#pragma unroll 1
    for (uint32_t w = first; w < warps; w += span) sum += all[w].y * scale(all[w].x, largest);
#pragma unroll
    for (uint32_t offset = 16; offset > 0; offset /= 2) {
      if (offset < span) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    }
    return make_float2(largest, sum);
  }

  // Reduces over all threads; all get the same bits. `slot` is 0 or 1, each used once.
  template <typename Op>
  __device__ __forceinline__ float reduce(float value, Op op, int slot) const {
    const float2* all = exchange(make_float2(group_reduce<32>(value, op), 0.0f), slot);
    value = Op::kNeutral;
    for (uint32_t warp = threadIdx.x % 32; warp < warps(); warp += 32) {
      value = op(value, all[warp].x);
    }
    return group_reduce<32>(value, op);
  }

  // Two sums over all threads, likewise.
  __device__ __forceinline__ float2 sums(float2 value, int slot) const {
    const float2* all = exchange(
        make_float2(lanes_reduce<32>(value.x, SumOf()), lanes_reduce<32>(value.y, SumOf())), slot);
    value = make_float2(0.0f, 0.0f);
    for (uint32_t warp = threadIdx.x % 32; warp < warps(); warp += 32) {
      value = make_float2(value.x + all[warp].x, value.y + all[warp].y);
    }
    return make_float2(lanes_reduce<32>(value.x, SumOf()), lanes_reduce<32>(value.y, SumOf()));
  }

 private:
  static constexpr int kSlots = 2;
  struct Shared {
    uint64_t arrived[kSlots];
    float2 of_warps[kSlots][kSoftmaxWarps];
  };
  static __device__ __forceinline__ Shared& shared() {
    __shared__ Shared memory;
    return memory;
  }
  __device__ __forceinline__ uint32_t warps() const { return blocks_ * blockDim.x / 32; }

  // The warps' values, in shared memory.
  __device__ __forceinline__ const float2* exchange(float2 mine, int slot) const {
    float2* all = shared().of_warps[slot];
    const uint32_t lane = threadIdx.x % 32;
    if (blocks_ == 1) {
      if (lane == 0) all[threadIdx.x / 32] = mine;
      __syncthreads();
      return all;
    }
    uint64_t* arrived = &shared().arrived[slot];
    if (lane < blocks_) send_remote(&all[rank() / 32], arrived, lane, mine);
    mbarrier_wait(arrived, 0);
    return all;
  }

  uint32_t blocks_;
};

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_ROW_GROUP_CUH_
