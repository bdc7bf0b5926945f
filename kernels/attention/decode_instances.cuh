// SPDX-License-Identifier: Apache-2.0
// The table of decode_attention's instances for one dtype and cache.
#ifndef KERNELS_ATTENTION_DECODE_INSTANCES_CUH_
#define KERNELS_ATTENTION_DECODE_INSTANCES_CUH_

#include "kernels/attention/decode_attention.cuh"
#include "kernels/attention/decode_together.cuh"

// Blocks a multiprocessor holds: as many as its shared memory has room for.
#define TIERCEL_DECODE(dtype, float8, d, any_d, tiles, residents)                        \
  {DType::k##dtype,                                                                      \
   float8,                                                                               \
   d,                                                                                    \
   any_d,                                                                                \
   tiles,                                                                                \
   residents,                                                                            \
   false,                                                                                \
   sizeof(DecodeShared<DecodeShape<dtype, float8, d, any_d, tiles>>),                    \
   Kernel("decode_attention<" #dtype ", float8=" #float8 ", d=" #d ", any_d=" #any_d     \
          ", tiles=" #tiles ">",                                                         \
          reinterpret_cast<const void*>(                                                 \
              decode_attention<DecodeShape<dtype, float8, d, any_d, tiles>, residents>), \
          sizeof(DecodeShared<DecodeShape<dtype, float8, d, any_d, tiles>>))}

#define TIERCEL_TOGETHER(dtype, float8, d)                                             \
  {DType::k##dtype,                                                                     \
   float8,                                                                              \
   d,                                                                                   \
   false,                                                                               \
   1,                                                                                   \
   1,                                                                                   \
   true,                                                                                \
   sizeof(TogetherShared<DecodeShape<dtype, float8, d, false, 1, kTogetherHeads>>),     \
   Kernel("decode_together<" #dtype ", float8=" #float8 ", d=" #d ">",                  \
          reinterpret_cast<const void*>(                                                \
              decode_together<DecodeShape<dtype, float8, d, false, 1, kTogetherHeads>>), \
          sizeof(TogetherShared<DecodeShape<dtype, float8, d, false, 1, kTogetherHeads>>))}

// By head dimension, then by rows: the launcher takes the first that fits.
#define TIERCEL_DECODE_TABLE(dtype, float8)         \
  {TIERCEL_DECODE(dtype, float8, 64, false, 1, 2),  \
   TIERCEL_DECODE(dtype, float8, 64, false, 2, 2),  \
   TIERCEL_DECODE(dtype, float8, 128, false, 1, 2), \
   TIERCEL_DECODE(dtype, float8, 128, false, 2, 2), \
   TIERCEL_DECODE(dtype, float8, 128, true, 1, 2),  \
   TIERCEL_DECODE(dtype, float8, 256, true, 1, (float8 ? 2 : 1)), \
   TIERCEL_TOGETHER(dtype, float8, 64), TIERCEL_TOGETHER(dtype, float8, 128)}

#endif  // KERNELS_ATTENTION_DECODE_INSTANCES_CUH_
