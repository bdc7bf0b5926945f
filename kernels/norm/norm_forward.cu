// SPDX-License-Identifier: Apache-2.0
// The instances of norm_short, norm_forward, norm_plain and norm_long.
#include "kernels/norm/norm_forward.cuh"
#include "kernels/norm/norm_long.cuh"
#include "kernels/norm/norm_plain.cuh"
#include "kernels/norm/norm_short.cuh"

namespace tiercel {
namespace {

#define TIERCEL_SHORT(dtype, wide, lanes, vectors, rows, residual, kinds)              \
  {DType::k##dtype,                                                                    \
   wide,                                                                               \
   residual,                                                                           \
   NormSpecialization::k##kinds,                                                       \
   NormRowOwner::kShort,                                                               \
   lanes,                                                                              \
   vectors,                                                                            \
   rows,                                                                               \
   Kernel("norm_short<" #dtype ", wide=" #wide ", lanes=" #lanes ", vectors=" #vectors \
          ", rows=" #rows ", residual=" #residual ", " #kinds ">",                     \
          reinterpret_cast<const void*>(                                               \
              norm_short<dtype, wide, lanes, vectors, rows, residual,                  \
                         NormSpecialization::k##kinds == NormSpecialization::kBoth,    \
                         NormSpecialization::k##kinds == NormSpecialization::kLayer>))}
#define TIERCEL_ANY(dtype, wide, lanes, vectors, rows)           \
  TIERCEL_SHORT(dtype, wide, lanes, vectors, rows, false, Both), \
      TIERCEL_SHORT(dtype, wide, lanes, vectors, rows, true, Both)
#define TIERCEL_LANES(dtype, lanes)                    \
  TIERCEL_SHORT(dtype, true, lanes, 1, 2, false, Rms), \
      TIERCEL_SHORT(dtype, true, lanes, 1, 2, false, Layer), TIERCEL_ANY(dtype, true, lanes, 1, 2)
#define TIERCEL_BLOCK(dtype, wide, vectors, residual)                                          \
  {DType::k##dtype,                                                                            \
   wide,                                                                                       \
   residual,                                                                                   \
   NormSpecialization::kBoth,                                                                  \
   NormRowOwner::kBlock,                                                                       \
   0,                                                                                          \
   vectors,                                                                                    \
   1,                                                                                          \
   Kernel("norm_forward<" #dtype ", wide=" #wide ", vectors=" #vectors ", residual=" #residual \
          ">",                                                                                 \
          reinterpret_cast<const void*>(norm_forward<dtype, wide, vectors, residual>))}
#define TIERCEL_BLOCKS(dtype, wide, vectors) \
  TIERCEL_BLOCK(dtype, wide, vectors, false), TIERCEL_BLOCK(dtype, wide, vectors, true)
#define TIERCEL_PLAIN(dtype, lanes, vectors, residual, kinds)                                     \
  {DType::k##dtype,                                                                               \
   true,                                                                                          \
   residual,                                                                                      \
   NormSpecialization::k##kinds,                                                                  \
   NormRowOwner::kPlain,                                                                          \
   lanes,                                                                                         \
   vectors,                                                                                       \
   1,                                                                                             \
   Kernel(                                                                                        \
       "norm_plain<" #dtype ", lanes=" #lanes ", vectors=" #vectors ", residual=" #residual       \
       ", " #kinds ">",                                                                           \
       reinterpret_cast<const void*>(                                                             \
           norm_plain<dtype, vectors, NormSpecialization::k##kinds == NormSpecialization::kLayer, \
                      lanes == 32, residual>))}
#define TIERCEL_PLAINS(dtype, lanes, vectors)       \
  TIERCEL_PLAIN(dtype, lanes, vectors, false, Rms), \
      TIERCEL_PLAIN(dtype, lanes, vectors, false, Layer)
#define TIERCEL_LONG(dtype, vectors, kinds)                          \
  {DType::k##dtype,                                                  \
   true,                                                             \
   false,                                                            \
   NormSpecialization::k##kinds,                                     \
   NormRowOwner::kLong,                                              \
   0,                                                                \
   vectors,                                                          \
   1,                                                                \
   Kernel("norm_long<" #dtype ", vectors=" #vectors ", " #kinds ">", \
          reinterpret_cast<const void*>(                             \
              norm_long<dtype, vectors,                              \
                        NormSpecialization::k##kinds == NormSpecialization::kLayer>))}
// Specialisations for the common 16-bit calls.
#define TIERCEL_MOST(dtype)                                                              \
  TIERCEL_PLAINS(dtype, 0, 1), TIERCEL_PLAINS(dtype, 0, 2), TIERCEL_PLAINS(dtype, 0, 4), \
      TIERCEL_PLAIN(dtype, 0, 2, true, Rms), TIERCEL_PLAIN(dtype, 0, 4, true, Rms),      \
      TIERCEL_PLAIN(dtype, 32, 4, true, Rms), TIERCEL_LONG(dtype, 4, Rms),               \
      TIERCEL_LONG(dtype, 4, Layer), TIERCEL_LONG(dtype, 8, Rms), TIERCEL_LONG(dtype, 8, Layer)
#define TIERCEL_ALL(dtype)                                                                    \
  TIERCEL_SHORT(dtype, true, 8, 1, 1, false, Rms),                                            \
      TIERCEL_SHORT(dtype, true, 8, 1, 2, false, Layer), TIERCEL_ANY(dtype, true, 8, 1, 2),   \
      TIERCEL_LANES(dtype, 16), TIERCEL_LANES(dtype, 32), TIERCEL_ANY(dtype, true, 32, 2, 1), \
      TIERCEL_PLAINS(dtype, 32, 2), TIERCEL_PLAINS(dtype, 32, 4),                             \
      TIERCEL_ANY(dtype, true, 32, 4, 1), TIERCEL_ANY(dtype, false, 8, 4, 1),                 \
      TIERCEL_ANY(dtype, false, 32, 4, 1), TIERCEL_BLOCK(dtype, true, 1, true),               \
      TIERCEL_BLOCKS(dtype, true, 2), TIERCEL_BLOCKS(dtype, true, 4),                         \
      TIERCEL_BLOCKS(dtype, true, 8), TIERCEL_BLOCKS(dtype, false, 4),                        \
      TIERCEL_BLOCK(dtype, false, 32, false), TIERCEL_BLOCK(dtype, false, 16, true)

const NormForwardKernel kForward[] = {
    TIERCEL_ALL(BFloat16),          TIERCEL_MOST(BFloat16), TIERCEL_ALL(Float16),
    TIERCEL_MOST(Float16),          TIERCEL_ALL(Float32),   TIERCEL_BLOCK(Float32, true, 1, false),
    TIERCEL_LONG(Float32, 4, Layer)};

}  // namespace

const NormForwardKernel* norm_forward_kernels(int* count) {
  *count = sizeof(kForward) / sizeof(kForward[0]);
  return kForward;
}

}  // namespace tiercel
