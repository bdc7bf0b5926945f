// SPDX-License-Identifier: Apache-2.0
// Exponentials of scores below a row's largest one: exact, fast, and in two instructions.
#ifndef KERNELS_SOFTMAX_EXPONENTIALS_CUH_
#define KERNELS_SOFTMAX_EXPONENTIALS_CUH_

#include <type_traits>

#include "kernels/sm90/exponential.cuh"
#include "kernels/softmax/row_group.cuh"

namespace tiercel {

// Never part of a fused multiplication and addition.
__device__ __forceinline__ float rounded_product(float a, float b) {
  float value;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
  return value;
}

// exp(factor * (x - largest)). Exact: to a unit in the last place. Otherwise to about 2^-20, in
// three instructions; the difference comes first, which is exact for large scores too. NaN for a
// largest of -inf or +inf as it has to be: such rows are NaN.
template <bool kExact>
struct ExpBelow {
  float largest, factor;
  __device__ __forceinline__ ExpBelow(float largest, float factor)
      : largest(largest), factor(kExact ? factor : factor * kLog2E) {}
  __device__ __forceinline__ float operator()(float x) const {
    return kExact ? expf((x - largest) * factor) : exp2_approx((x - largest) * factor);
  }
  // The same of another largest score: the factor from sums below that one to sums below this.
  __device__ __forceinline__ float of_largest(float x) const { return operator()(x); }
  __device__ __forceinline__ float log_of(float sum) const { return logf(sum); }
};

// The same of 16-bit scores, in two instructions: 2 to a score's multiple minus the largest one's.
// That rounds the latter, by as much for every score of a row: its shares do not show it.
struct PackedExpBelow {
  float largest, factor, shift;
  __device__ __forceinline__ PackedExpBelow(float largest, float factor)
      : largest(largest), factor(factor * kLog2E), shift(rounded_product(largest, this->factor)) {
    if (fabsf(shift) >= 0x1p28f && fabsf(largest) < kInfinity) {
      // Rounded by more than an exponential bears. But another 16-bit score is that far below that
      // its exponential is 0, with any factor: one that makes the largest score 2^30 to 2^31.
      const int exponent = __float_as_int(largest) >> 23 & 0xff;
      this->factor = __int_as_float((284 - max(exponent, 30)) << 23);
      shift = rounded_product(largest, this->factor);
    }
  }
  __device__ __forceinline__ float operator()(float x) const {
    return exp2_approx(fmaf(x, factor, -shift));
  }
  __device__ __forceinline__ float of_largest(float x) const {
    return exp2_approx(rounded_product(x, factor) - shift);
  }
  // The logarithm of a sum of these, without what the rounding gave each.
  __device__ __forceinline__ float log_of(float sum) const {
    return fmaf(fmaf(largest, factor, -shift), -1.0f / kLog2E, logf(sum));
  }
};

template <typename Format>
using BlockExp = std::conditional_t<Format::kBytes == 4, ExpBelow<true>, PackedExpBelow>;

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_EXPONENTIALS_CUH_
