// SPDX-License-Identifier: Apache-2.0
// Mean and variance in one pass. A thread sums differences from its first element: their squares
// are at most count + 1 times the squared differences from the mean, so there is little
// cancellation for any data. Chan's formula merges threads, warps and blocks. The mean is kept as
// two numbers, a value near it and the distance from that value: a single float32 would be off by
// up to half a unit in the last place, and x - mean with it, which can exceed the deviation.
#ifndef KERNELS_NORM_MOMENTS_CUH_
#define KERNELS_NORM_MOMENTS_CUH_

#include "kernels/sm90/reduce.cuh"

namespace tiercel {

// Element count and its reciprocal (1 for 0 elements); computed before the data arrives.
struct Count {
  float number, inverse;

  __device__ __forceinline__ explicit Count(int count) {
    number = static_cast<float>(count);
    inverse = __fdividef(1.0f, fmaxf(number, 1.0f));
  }
  // The warp's counts, from each thread's.
  static __device__ __forceinline__ Count of_warp(int count) {
    return Count(__reduce_add_sync(kFullWarp, count));
  }
};

// The median of three values of a row. Distances from it cancel little for any mean, even if one of
// the three is an outlier.
__device__ __forceinline__ float middle_of(float a, float b, float c) {
  return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c));
}

// A row's moments. The mean is `about` + `apart`; `square` sums the squared distances from it.
struct RowMoments {
  float about, apart, square;
};

// Sums of some elements' distances from `about`, a value near their mean, and of the squared
// distances.
struct Moments {
  float about, sum, square;

  // inverse_count: 1 / the number of elements.
  __device__ __forceinline__ RowMoments of_row(float inverse_count) const {
    const float apart = sum * inverse_count;
    return {about, apart, fmaf(-apart, sum, square)};
  }
  // The entry that a warp hands to its team's join().
  __device__ __forceinline__ float4 entry(Count warps) const {
    const RowMoments own = of_row(warps.inverse);
    return make_float4(own.square, own.about, warps.number, own.apart);
  }
  // Distance of an entry's mean from `about`.
  static __device__ __forceinline__ float distance(float4 entry, float about) {
    return (entry.y - about) + entry.w;
  }
};

// A thread's moments, in kWays independent sums: two shorten the dependency chain, one takes fewer
// registers.
template <int kWays = 2>
class Distances {
 public:
  // Call before the first add(), with one of the elements.
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

  // The warp's moments; each thread has added its own elements.
  __device__ __forceinline__ Moments of_warp(Count own) const {
    const float n = own.number;
    const float sum = kWays > 1 ? sums_[0] + sums_[kWays - 1] : sums_[0];
    const float squares = kWays > 1 ? squares_[0] + squares_[kWays - 1] : squares_[0];
    const float apart = sum * own.inverse;
    // `about` is near the mean; the distance corrects for the rest.
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
