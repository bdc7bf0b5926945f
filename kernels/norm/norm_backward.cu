// SPDX-License-Identifier: Apache-2.0
// The instances of norm_backward, norm_backward_short and norm_reduce.
#include "kernels/norm/norm_backward.cuh"
#include "kernels/norm/norm_backward_short.cuh"
#include "kernels/norm/norm_reduce.cuh"

namespace tiercel {
namespace {

#define TIERCEL_KERNEL(dtype, wide, vectors, rows, kind, layer)                                    \
  {DType::k##dtype,                                                                                \
   wide,                                                                                           \
   NormKind::k##kind,                                                                              \
   vectors,                                                                                        \
   rows,                                                                                           \
   false,                                                                                          \
   Kernel("norm_backward<" #dtype ", wide=" #wide ", vectors=" #vectors ", rows=" #rows ", " #kind \
          ">",                                                                                     \
          reinterpret_cast<const void*>(norm_backward<dtype, wide, vectors, rows, layer>),         \
          kNormMaxDynamicSmem)}
#define TIERCEL_KINDS(dtype, wide, vectors, rows)         \
  TIERCEL_KERNEL(dtype, wide, vectors, rows, Rms, false), \
      TIERCEL_KERNEL(dtype, wide, vectors, rows, Layer, true)
#define TIERCEL_SHORT(dtype, vectors)                                         \
  {DType::k##dtype,                                                           \
   true,                                                                      \
   NormKind::kLayer,                                                          \
   vectors,                                                                   \
   1,                                                                         \
   true,                                                                      \
   Kernel("norm_backward_short<" #dtype ", vectors=" #vectors ">",            \
          reinterpret_cast<const void*>(norm_backward_short<dtype, vectors>), \
          kNormMaxDynamicSmem)}
#define TIERCEL_SHORTS(dtype) \
  TIERCEL_SHORT(dtype, 2), TIERCEL_SHORT(dtype, 3), TIERCEL_SHORT(dtype, 4)
#define TIERCEL_ALL(dtype) TIERCEL_KINDS(dtype, true, 2, 1), TIERCEL_KINDS(dtype, true, 4, 1)
#define TIERCEL_HALVES(dtype)                                                             \
  TIERCEL_ALL(dtype), TIERCEL_KINDS(dtype, true, 2, 2), TIERCEL_KINDS(dtype, true, 3, 1), \
      TIERCEL_KINDS(dtype, false, 8, 1)

const NormBackwardKernel kBackward[] = {TIERCEL_HALVES(BFloat16),
                                        TIERCEL_HALVES(Float16),
                                        TIERCEL_ALL(Float32),
                                        TIERCEL_KINDS(Float32, true, 8, 1),
                                        TIERCEL_KINDS(Float32, false, 16, 1),
                                        TIERCEL_SHORTS(BFloat16),
                                        TIERCEL_SHORTS(Float16)};

#define TIERCEL_REDUCE(dtype, columns)                     \
  {DType::k##dtype, columns,                               \
   Kernel("norm_reduce<" #dtype ", columns=" #columns ">", \
          reinterpret_cast<const void*>(norm_reduce<dtype, columns>))}

const NormReduceKernel kReduce[] = {TIERCEL_REDUCE(BFloat16, 1), TIERCEL_REDUCE(BFloat16, 2),
                                    TIERCEL_REDUCE(Float16, 1),  TIERCEL_REDUCE(Float16, 2),
                                    TIERCEL_REDUCE(Float32, 1),  TIERCEL_REDUCE(Float32, 2)};

}  // namespace

const NormBackwardKernel* norm_backward_kernels(int* count) {
  *count = sizeof(kBackward) / sizeof(kBackward[0]);
  return kBackward;
}

const NormReduceKernel* norm_reduce_kernels(int* count) {
  *count = sizeof(kReduce) / sizeof(kReduce[0]);
  return kReduce;
}

}  // namespace tiercel
