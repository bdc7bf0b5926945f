// SPDX-License-Identifier: Apache-2.0
// Mean and variance in one pass. A thread measures its elements from the first of them: squares
// about that are at most their count and one times those about their mean, so little cancels
// whatever the data. Chan's formula joins threads, warps and blocks.
#ifndef KERNELS_NORM_MOMENTS_CUH_
#define KERNELS_NORM_MOMENTS_CUH_

#include "kernels/sm90/reduce.cuh"

namespace tiercel {

// A warp's: the sum of its elements' distances from `about`, which is near their mean, and the
// squares of those. Of `count` elements, inverse_count = 1 / count:
struct Moments {
  float about, sum, square;

  __device__ __forceinline__ float mean(float inverse_count) const {
    return fmaf(sum, inverse_count, about);
  }
  __device__ __forceinline__ float about_mean(float inverse_count) const {
    return fmaf(-sum * inverse_count, sum, square);
  }
  // What BlockTeam::join() wants; `count` is this thread's.
  __device__ __forceinline__ float4 entry(int count) const {
    const float all = static_cast<float>(__reduce_add_sync(kFullWarp, count));
    const float inverse = __fdividef(1.0f, fmaxf(all, 1.0f));
    return make_float4(0.0f, about_mean(inverse), mean(inverse), all);
  }
};

// A thread's elements, in sums of kWays: two are shorter ways, one takes fewer registers.
template <int kWays = 2>
class Distances {
 public:
  // Before the first add(), one of the elements.
  __device__ __forceinline__ void measure_from(float first) { first_ = first; }

  template <int kElements>
  __device__ __forceinline__ void add(const float (&values)[kElements]) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float distance = values[i] - first_;
      sums_[i % kWays] += distance;
      squares_[i % kWays] = fmaf(distance, distance, squares_[i % kWays]);
    }
  }

  // The warp's, of which this thread has added `count`.
  __device__ __forceinline__ Moments of_warp(int count) const {
    const float n = static_cast<float>(count);
    const float sum = kWays > 1 ? sums_[0] + sums_[kWays - 1] : sums_[0];
    const float squares = kWays > 1 ? squares_[0] + squares_[kWays - 1] : squares_[0];
    const float apart = __fdividef(sum, fmaxf(n, 1.0f));
    const float mean = first_ + apart;
    // About what is nearly the mean, and right for that.
    const float square = fmaf(apart, fmaf(n, apart, -2.0f * sum), squares);
    const float about = __shfl_sync(kFullWarp, mean, 0);
    const float distance = mean - about, part = n * distance;
    return {about, lanes_reduce<32>(part, Sum()),
            lanes_reduce<32>(fmaf(part, distance, square), Sum())};
  }

 private:
  float first_ = 0.0f;
  float sums_[kWays] = {};
  float squares_[kWays] = {};
};

}  // namespace tiercel

#endif  // KERNELS_NORM_MOMENTS_CUH_
