// SPDX-License-Identifier: Apache-2.0
// Exponentials of scores relative to a row's maximum: exact, fast, and in two instructions.
#ifndef KERNELS_SOFTMAX_EXPONENTIALS_CUH_
#define KERNELS_SOFTMAX_EXPONENTIALS_CUH_

#include <type_traits>

#include "kernels/sm90/exponential.cuh"
#include "kernels/softmax/row_group.cuh"

namespace tiercel {

// A multiplication that is never fused with an addition.
__device__ __forceinline__ float rounded_product(float a, float b) {
  float value;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
  return value;
}

// exp(factor * (x - largest)). Exact: to a unit in the last place. Otherwise to about 2^-20 in
// three instructions; subtracting first keeps large scores exact. NaN if `largest` is infinite, as
// required: such rows are NaN.
template <bool kExact>
struct ExpBelow {
  float largest, factor;
  __device__ __forceinline__ ExpBelow(float largest, float factor)
      : largest(largest), factor(kExact ? factor : factor * kLog2E) {}
  __device__ __forceinline__ float operator()(float x) const {
    return kExact ? expf((x - largest) * factor) : exp2_approx((x - largest) * factor);
  }
  // The factor that rescales sums relative to another maximum to this one.
  __device__ __forceinline__ float of_largest(float x) const { return operator()(x); }
  __device__ __forceinline__ float log_of(float sum) const { return logf(sum); }
};

// For 16-bit scores, in two instructions: 2^(factor * x - factor * largest). The second product is
// rounded, but equally for all scores of a row, so the quotients do not change.
struct PackedExpBelow {
  float largest, factor, shift;
  __device__ __forceinline__ PackedExpBelow(float largest, float factor)
      : largest(largest), factor(factor * kLog2E), shift(rounded_product(largest, this->factor)) {
    if (fabsf(shift) >= 0x1p28f && fabsf(largest) < kInfinity) {
      // The rounding error is too large for an exponential. But then every smaller 16-bit score is
      // so far below that its exponential is 0 with any factor; use one that brings the maximum to
      // 2^30 to 2^31.
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
  // The logarithm of a sum of these exponentials, corrected for the rounding.
  __device__ __forceinline__ float log_of(float sum) const {
    return fmaf(fmaf(largest, factor, -shift), -1.0f / kLog2E, logf(sum));
  }
};

template <typename Format>
using BlockExp = std::conditional_t<Format::kBytes == 4, ExpBelow<true>, PackedExpBelow>;

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_EXPONENTIALS_CUH_
