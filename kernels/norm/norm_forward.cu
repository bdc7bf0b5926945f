// SPDX-License-Identifier: Apache-2.0
// The instances of norm_forward.
#include "kernels/norm/norm_forward.cuh"

namespace tiercel {
namespace {

#define TIERCEL_KERNEL(dtype, wide, vectors, residual, block_row)                              \
  {DType::k##dtype,                                                                            \
   wide,                                                                                       \
   residual,                                                                                   \
   block_row,                                                                                  \
   vectors,                                                                                    \
   Kernel("norm_forward<" #dtype ", wide=" #wide ", vectors=" #vectors ", residual=" #residual \
          ", block_row=" #block_row ">",                                                       \
          reinterpret_cast<const void*>(norm_forward<dtype, wide, vectors, residual, block_row>))}
#define TIERCEL_BOTH(dtype, wide, vectors, block_row)     \
  TIERCEL_KERNEL(dtype, wide, vectors, false, block_row), \
      TIERCEL_KERNEL(dtype, wide, vectors, true, block_row)
#define TIERCEL_ALL(dtype)                                                                \
  TIERCEL_BOTH(dtype, true, 1, false), TIERCEL_BOTH(dtype, true, 2, false),               \
      TIERCEL_BOTH(dtype, true, 4, false), TIERCEL_BOTH(dtype, true, 1, true),            \
      TIERCEL_BOTH(dtype, true, 2, true), TIERCEL_BOTH(dtype, true, 4, true),             \
      TIERCEL_BOTH(dtype, true, 8, true), TIERCEL_BOTH(dtype, false, 4, false),           \
      TIERCEL_BOTH(dtype, false, 4, true), TIERCEL_KERNEL(dtype, false, 32, false, true), \
      TIERCEL_KERNEL(dtype, false, 16, true, true)

const NormForwardKernel kForward[] = {TIERCEL_ALL(BFloat16), TIERCEL_ALL(Float16),
                                      TIERCEL_ALL(Float32)};

}  // namespace

const NormForwardKernel* norm_forward_kernels(int* count) {
  *count = sizeof(kForward) / sizeof(kForward[0]);
  return kForward;
}

}  // namespace tiercel
