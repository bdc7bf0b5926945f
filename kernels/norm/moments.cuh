// SPDX-License-Identifier: Apache-2.0
// Mean and variance in one pass. A thread measures its elements from the first of them: squares
// about that are at most their count and one times those about their mean, so little cancels
// whatever the data. Chan's formula joins threads, warps and blocks.
#ifndef KERNELS_NORM_MOMENTS_CUH_
#define KERNELS_NORM_MOMENTS_CUH_

#include "kernels/sm90/reduce.cuh"

namespace tiercel {

// How many elements somebody has, and the inverse, of none 1: known before the elements are.
struct Count {
  float number, inverse;

  __device__ __forceinline__ explicit Count(int count) {
    number = static_cast<float>(count);
    inverse = __fdividef(1.0f, fmaxf(number, 1.0f));
  }
  // A warp's, of each thread's.
  static __device__ __forceinline__ Count of_warp(int count) {
    return Count(__reduce_add_sync(kFullWarp, count));
  }
};

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
  // What a team's join() wants.
  __device__ __forceinline__ float4 entry(Count warps) const {
    return make_float4(about_mean(warps.inverse), mean(warps.inverse), warps.number, 0.0f);
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

  // The warp's, of which this thread has added its own.
  __device__ __forceinline__ Moments of_warp(Count own) const {
    const float n = own.number;
    const float sum = kWays > 1 ? sums_[0] + sums_[kWays - 1] : sums_[0];
    const float squares = kWays > 1 ? squares_[0] + squares_[kWays - 1] : squares_[0];
    const float apart = sum * own.inverse;
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
