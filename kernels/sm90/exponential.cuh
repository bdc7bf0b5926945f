// SPDX-License-Identifier: Apache-2.0
// Powers of two in one instruction.
#ifndef KERNELS_SM90_EXPONENTIAL_CUH_
#define KERNELS_SM90_EXPONENTIAL_CUH_

namespace tiercel {

inline constexpr float kLog2E = 1.44269504f;

// 2^x with a relative error of about 2^-22; 0 below 2^-126.
__device__ __forceinline__ float exp2_approx(float x) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

}  // namespace tiercel

#endif  // KERNELS_SM90_EXPONENTIAL_CUH_
