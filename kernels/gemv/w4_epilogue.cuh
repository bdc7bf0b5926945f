// SPDX-License-Identifier: Apache-2.0
// The last steps of w4_linear's kernels: the bias and the activation.
#ifndef KERNELS_GEMV_W4_EPILOGUE_CUH_
#define KERNELS_GEMV_W4_EPILOGUE_CUH_

#include <cstdint>

#include "kernels/activation/functions.cuh"
#include "kernels/gemv/w4_format.h"

namespace tiercel {

__device__ __forceinline__ float activated(W4Activation activation, float x) {
  switch (activation) {
    case W4Activation::kNone:
      return x;
    case W4Activation::kRelu:
      return Relu<false>::value(x);
    case W4Activation::kSilu:
      return Silu<false>::value(x);
    case W4Activation::kGelu:
      return Gelu<false>::value(x);
    case W4Activation::kGeluTanh:
      return GeluTanh<false>::value(x);
    case W4Activation::kReluSquared: {
      const float positive = Relu<false>::value(x);
      return positive * positive;
    }
  }
  return x;
}

// The bias of a feature; if there is none, -0, which leaves every sum as it is.
template <typename Format>
__device__ __forceinline__ float bias_of(const W4Epilogue& epilogue, int feature, int features) {
  if (epilogue.bias == nullptr || feature >= features) return -0.0f;
  return Format::from_bits(epilogue.bias[feature]);
}

}  // namespace tiercel

#endif  // KERNELS_GEMV_W4_EPILOGUE_CUH_
