// SPDX-License-Identifier: Apache-2.0
// The table of decode_attention's instances for one dtype and cache.
#ifndef KERNELS_ATTENTION_DECODE_INSTANCES_CUH_
#define KERNELS_ATTENTION_DECODE_INSTANCES_CUH_

#include "kernels/attention/decode/kernel.cuh"

#define TIERCEL_DECODE(dtype, float8, d, any_d, tiles, spread, residents)                        \
  {DType::k##dtype,                                                                              \
   float8,                                                                                       \
   d,                                                                                            \
   any_d,                                                                                        \
   tiles,                                                                                        \
   residents,                                                                                    \
   spread,                                                                                       \
   DecodeShape<dtype, float8, d, any_d, tiles, spread>::kWarps,                                  \
   sizeof(DecodeShared<DecodeShape<dtype, float8, d, any_d, tiles, spread>>),                    \
   Kernel("decode_attention<" #dtype ", float8=" #float8 ", d=" #d ", any_d=" #any_d             \
          ", tiles=" #tiles ", spread=" #spread ">",                                             \
          reinterpret_cast<const void*>(                                                         \
              decode_attention<DecodeShape<dtype, float8, d, any_d, tiles, spread>, residents>), \
          sizeof(DecodeShared<DecodeShape<dtype, float8, d, any_d, tiles, spread>>))}

// The last two: blocks a multiprocessor holds where a cluster has a tile, and where tiles are
// spread.
#define TIERCEL_DECODE_BOTH(dtype, float8, d, any_d, tiles, clustered, spread) \
  TIERCEL_DECODE(dtype, float8, d, any_d, tiles, false, clustered),            \
      TIERCEL_DECODE(dtype, float8, d, any_d, tiles, true, spread)

// By head dimension, then by rows: the launcher takes the first that fits.
#define TIERCEL_DECODE_TABLE(dtype, float8)                    \
  TIERCEL_DECODE_BOTH(dtype, float8, 64, false, 1, 2, 1),      \
      TIERCEL_DECODE_BOTH(dtype, float8, 64, false, 2, 2, 2),  \
      TIERCEL_DECODE_BOTH(dtype, float8, 128, false, 1, 2, 1), \
      TIERCEL_DECODE_BOTH(dtype, float8, 128, false, 2, 2, 2), \
      TIERCEL_DECODE_BOTH(dtype, float8, 128, true, 1, 2, 1),  \
      TIERCEL_DECODE_BOTH(dtype, float8, 256, true, 1, (float8 ? 2 : 1), 1)

#endif  // KERNELS_ATTENTION_DECODE_INSTANCES_CUH_
