// SPDX-License-Identifier: Apache-2.0
// One reduction over the warps of a block that owns a row. Everything that does not need the row is
// computed before it arrives; after that there are as few steps as the number of warps allows.
#ifndef KERNELS_NORM_SINGLE_BLOCK_REDUCE_CUH_
#define KERNELS_NORM_SINGLE_BLOCK_REDUCE_CUH_

#include <cstdint>

#include "kernels/norm/elements.cuh"
#include "kernels/norm/moments.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

// Up to kWarps warps. Call sum() or join() once: nothing waits until all have read the scratch.
template <int kWarps>
class SingleBlockReduce {
  static_assert(kWarps == 1 || kWarps == 4 || kWarps == 8 || kWarps == 16,
                "four at a time, a tree");

 public:
  struct Scratch {
    float4 moments[kWarps];
    float sums[kWarps];
  };

  // Entries without a warp add nothing.
  __device__ __forceinline__ explicit SingleBlockReduce(Scratch& scratch)
      : moments_(shared_address(scratch.moments)),
        sums_(shared_address(scratch.sums)),
        warps_(blockDim.x / 32) {
    if constexpr (kWarps == 1) return;
    const int thread = threadIdx.x;
    if (thread >= warps_ && thread < kWarps) {
      scratch.moments[thread] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      scratch.sums[thread] = 0.0f;
    }
    materialize_now(moments_, sums_, warps_);
  }

  // Returns the sum of all warps' values.
  __device__ __forceinline__ float sum(float value) const {
    if (threadIdx.x % 32 == 0) {
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(sums_ + threadIdx.x / 8), "f"(value) : "memory");
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int first = 0; first < kWarps; first += 4) {
      if (first >= warps_) break;
      const float4 four = read(sums_ + first * 4);
      sum += (four.x + four.y) + (four.z + four.w);
    }
    return sum;
  }

  // Joins the warps' entries into the row's moments.
  __device__ __forceinline__ RowMoments join(float4 value, float inverse_columns) const {
    if (threadIdx.x % 32 == 0) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(moments_ + threadIdx.x / 2),
                   "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
                   : "memory");
    }
    __syncthreads();
    // Distances from the first warp's mean, which is near the row's: so all sums take one step.
    const float4 first = read(moments_), part = read(moments_ + threadIdx.x % kWarps * 16);
    const float about = first.y + first.w;
    const float distance = Moments::distance(part, about), product = part.z * distance;
    const Moments all = {about, lanes_reduce<kWarps>(product, Sum()),
                         lanes_reduce<kWarps>(fmaf(product, distance, part.x), Sum())};
    return all.of_row(inverse_columns);
  }

 private:
  static __device__ __forceinline__ float4 read(uint32_t address) {
    uint32_t words[4];
    load_shared(words, address);
    return make_float4(__uint_as_float(words[0]), __uint_as_float(words[1]),
                       __uint_as_float(words[2]), __uint_as_float(words[3]));
  }

  uint32_t moments_, sums_;  // in shared memory
  int warps_;
};

}  // namespace tiercel

#endif  // KERNELS_NORM_SINGLE_BLOCK_REDUCE_CUH_
