// SPDX-License-Identifier: Apache-2.0
// The instances of norm_forward.
#include "kernels/norm/norm_forward.cuh"

namespace tiercel {
namespace {

#define TIERCEL_KERNEL(dtype, wide, vectors, residual)                                           \
  {DType::k##dtype, wide, residual, vectors,                                                     \
   Kernel("norm_forward<" #dtype ", wide=" #wide ", vectors=" #vectors ", residual=" #residual ">", \
          reinterpret_cast<const void*>(norm_forward<dtype, wide, vectors, residual, false>),    \
          kNormMaxDynamicSmem)}
#define TIERCEL_BOTH(dtype, wide, vectors) \
  TIERCEL_KERNEL(dtype, wide, vectors, false), TIERCEL_KERNEL(dtype, wide, vectors, true)
#define TIERCEL_ALL(dtype)                                            \
  TIERCEL_BOTH(dtype, true, 1), TIERCEL_BOTH(dtype, true, 2),         \
      TIERCEL_BOTH(dtype, true, 4), TIERCEL_BOTH(dtype, true, 8),     \
      TIERCEL_BOTH(dtype, false, 4), TIERCEL_BOTH(dtype, false, 32)

const NormForwardKernel kForward[] = {TIERCEL_ALL(BFloat16), TIERCEL_ALL(Float16),
                                      TIERCEL_ALL(Float32)};

}  // namespace

const NormForwardKernel* norm_forward_kernels(int* count) {
  *count = sizeof(kForward) / sizeof(kForward[0]);
  return kForward;
}

}  // namespace tiercel
