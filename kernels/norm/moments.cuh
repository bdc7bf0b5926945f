// SPDX-License-Identifier: Apache-2.0
// Mean and variance in one pass. A thread measures its elements from the first of them: squares
// about that are at most their count and one times those about their mean, so little cancels
// whatever the data. Chan's formula joins threads, warps and blocks. A mean is kept in two parts,
// some value near it and the distance from there: rounded to float32 it would be wrong by up to
// half a unit of its last place, and x - mean by as much, which may be more than the deviation.
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

// The middle one of three of a row's values: distances from it cancel little, whatever the mean, if
// one of the three is an outlier.
__device__ __forceinline__ float middle_of(float a, float b, float c) {
  return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c));
}

// A row's moments: the mean is `about` + `apart`; `square` is the sum of squared distances from it.
struct RowMoments {
  float about, apart, square;
};

// Sums over some elements of their distances from `about`, which is near their mean, and of the
// squares of those distances.
struct Moments {
  float about, sum, square;

  // inverse_count: 1 / the number of elements.
  __device__ __forceinline__ RowMoments of_row(float inverse_count) const {
    const float apart = sum * inverse_count;
    return {about, apart, fmaf(-apart, sum, square)};
  }
  // The entry that a warp passes to its team's join().
  __device__ __forceinline__ float4 entry(Count warps) const {
    const RowMoments own = of_row(warps.inverse);
    return make_float4(own.square, own.about, warps.number, own.apart);
  }
  // Distance of the mean that an entry has from `about`.
  static __device__ __forceinline__ float distance(float4 entry, float about) {
    return (entry.y - about) + entry.w;
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
    // About what is nearly the mean, and right for that.
    const float square = fmaf(apart, fmaf(n, apart, -2.0f * sum), squares);
    const float about = __shfl_sync(kFullWarp, first_ + apart, 0);
    const float distance = (first_ - about) + apart, part = n * distance;
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
