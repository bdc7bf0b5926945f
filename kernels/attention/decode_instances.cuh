// SPDX-License-Identifier: Apache-2.0
// The table of decode_attention's instances for one dtype and cache.
#ifndef KERNELS_ATTENTION_DECODE_INSTANCES_CUH_
#define KERNELS_ATTENTION_DECODE_INSTANCES_CUH_

#include "kernels/attention/decode_attention.cuh"

// Blocks a multiprocessor holds: as many as registers allow without spills.
#define TIERCEL_DECODE(dtype, float8, d, any_d, tiles, residents)                    \
  {DType::k##dtype,                                                                  \
   float8,                                                                           \
   d,                                                                                \
   any_d,                                                                            \
   tiles,                                                                            \
   residents,                                                                        \
   Kernel("decode_attention<" #dtype ", float8=" #float8 ", d=" #d ", any_d=" #any_d \
          ", tiles=" #tiles ">",                                                     \
          reinterpret_cast<const void*>(                                             \
              decode_attention<DecodeShape<dtype, float8, d, any_d, tiles>, residents>))}

// By head dimension, then by rows: the launcher takes the first that fits.
#define TIERCEL_DECODE_TABLE(dtype, float8)            \
  {                                                    \
      TIERCEL_DECODE(dtype, float8, 64, false, 1, 3),  \
      TIERCEL_DECODE(dtype, float8, 64, false, 2, 2),  \
      TIERCEL_DECODE(dtype, float8, 128, false, 1, 3), \
      TIERCEL_DECODE(dtype, float8, 128, false, 2, 2), \
      TIERCEL_DECODE(dtype, float8, 128, true, 1, 3),  \
      TIERCEL_DECODE(dtype, float8, 256, true, 1, 2)}

#endif  // KERNELS_ATTENTION_DECODE_INSTANCES_CUH_
