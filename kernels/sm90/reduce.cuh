// SPDX-License-Identifier: Apache-2.0
// Reductions over groups of lanes, warps and blocks.
#ifndef KERNELS_SM90_REDUCE_CUH_
#define KERNELS_SM90_REDUCE_CUH_

#include <cstdint>

namespace tiercel {

inline constexpr unsigned kFullWarp = 0xffffffffu;

struct Sum {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

struct Max {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

struct Min {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};

// Over each group of kLanes neighbouring lanes; every lane gets the result, and all see the same
// bits.
template <int kLanes, typename T, typename Op>
__device__ __forceinline__ T lanes_reduce(T value, Op op) {
  static_assert(kLanes > 0 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0, "a power of two");
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = op(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

// Over the whole warp in one instruction.
__device__ __forceinline__ uint32_t warp_max(uint32_t value) {
  return __reduce_max_sync(kFullWarp, value);
}

// Over a block of kThreads; `scratch` holds kThreads / 32 values. Every thread gets the result; the
// caller puts a
// __syncthreads() before it uses `scratch` again.
template <int kThreads, typename T, typename Op>
__device__ __forceinline__ T block_reduce(T value, Op op, T* scratch) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kThreads % 32 == 0 && (kWarps & (kWarps - 1)) == 0, "a power of two of warps");
  value = lanes_reduce<32>(value, op);
  if constexpr (kWarps == 1) return value;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  return lanes_reduce<kWarps>(scratch[threadIdx.x % kWarps], op);
}

}  // namespace tiercel

#endif  // KERNELS_SM90_REDUCE_CUH_
