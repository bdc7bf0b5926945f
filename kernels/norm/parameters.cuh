// SPDX-License-Identifier: Apache-2.0
// Weight and bias of a norm, as they are read; and what is asked for before it may be read.
#ifndef KERNELS_NORM_PARAMETERS_CUH_
#define KERNELS_NORM_PARAMETERS_CUH_

#include "kernels/norm/elements.cuh"
#include "kernels/norm/norm_kernels.h"
#include "kernels/sm90/ahead.h"

namespace tiercel {

// A vector of weight or bias as float32.
template <typename Format, bool kWide>
__device__ __forceinline__ void read_parameter(float (&values)[Chunk<Format, kWide>::kElements],
                                               const char* data, bool float32, int column) {
  if (float32) {
    const float* const from = reinterpret_cast<const float*>(data) + column;
    if constexpr (kWide) {
#pragma unroll
      for (int p = 0; p < Chunk<Format, kWide>::kElements / 4; ++p) {
        const float4 part = reinterpret_cast<const float4*>(from)[p];
        values[4 * p] = part.x, values[4 * p + 1] = part.y;
        values[4 * p + 2] = part.z, values[4 * p + 3] = part.w;
      }
    } else {
      values[0] = *from;
    }
  } else {
    Chunk<Format, kWide> chunk;
    chunk.load_any(data + column * Format::kBytes);
    chunk.unpack(values);
  }
}

// By the first rows' threads only: all blocks asking for the same lines would take long.
inline constexpr int kNormParametersAhead = 8;
template <typename Format>
__device__ __forceinline__ void prefetch_parameters(const NormForwardArgs& args, int column) {
  if (args.weight != nullptr) {
    prefetch_l2(args.weight + column * (args.weight_float32 ? 4 : Format::kBytes));
  }
  if (args.bias != nullptr) {
    prefetch_l2(args.bias + column * (args.bias_float32 ? 4 : Format::kBytes));
  }
}

// A vector of weight or bias as it is in memory; of `absent` where there is none.
template <typename Format>
__device__ __forceinline__ void read_packed(Chunk<Format, true>& vector, const char* data,
                                            int column, float absent) {
  if (data != nullptr) {
    vector.load(data + column * Format::kBytes);
    return;
  }
  float same[16 / Format::kBytes];
#pragma unroll
  for (float& value : same) value = absent;
  vector.pack(same);
}

// A row's statistics, and what they make of a vector. An RMS norm has neither mean nor bias.
struct RowStatistics {
  float mean, rstd;

  template <bool kLayer, typename Format>
  __device__ __forceinline__ Chunk<Format, true> normalised(Chunk<Format, true> x,
                                                            Chunk<Format, true> weight,
                                                            Chunk<Format, true> bias) const {
    constexpr int kElements = 16 / Format::kBytes;
    float f[kElements], w[kElements], b[kElements];
    x.forget();
    x.unpack(f);
    weight.forget();
    weight.unpack(w);
    if constexpr (kLayer) {
      bias.forget();
      bias.unpack(b);
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if constexpr (!kLayer) {
        f[i] = f[i] * rstd * w[i];
      } else if constexpr (Format::kBytes == 2) {
        f[i] = fmaf(fmaf(f[i], rstd, -mean * rstd), w[i], b[i]);
      } else {
        f[i] = fmaf((f[i] - mean) * rstd, w[i], b[i]);  // to the last bits of a float32
      }
    }
    Chunk<Format, true> result;
    result.pack(f);
    return result;
  }
};

}  // namespace tiercel

#endif  // KERNELS_NORM_PARAMETERS_CUH_
