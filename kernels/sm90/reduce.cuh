// SPDX-License-Identifier: Apache-2.0
// Reductions over groups of lanes and warps.
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

// Reduces each group of kLanes neighbouring lanes; all lanes get the same bits.
template <int kLanes, typename T, typename Op>
__device__ __forceinline__ T lanes_reduce(T value, Op op) {
  static_assert(kLanes > 0 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0, "a power of two");
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = op(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

// Reduces the whole warp in one instruction.
__device__ __forceinline__ uint32_t warp_max(uint32_t value) {
  return __reduce_max_sync(kFullWarp, value);
}

}  // namespace tiercel

#endif  // KERNELS_SM90_REDUCE_CUH_
