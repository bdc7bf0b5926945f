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

// A vector of weight or bias as it is in memory, `offset` bytes on; of `absent` where there is
// none.
template <typename Format>
__device__ __forceinline__ void read_packed(Chunk<Format, true>& vector, const char* data,
                                            int offset, float absent) {
  if (data != nullptr) {
    vector.load(data + offset);
  } else {
    vector.fill(absent);
  }
}

// What a row's statistics make of its vectors. An RMS norm has neither mean nor bias.
template <typename Format, bool kLayer>
class Normaliser {
 public:
  using Values = Chunk<Format, true>;

  // Of float32, x - mean to the last bits: so the mean is not multiplied before.
  __device__ __forceinline__ Normaliser(float mean, float rstd)
      : rstd_(rstd), shift_(kMultiplied ? -mean * rstd : mean) {}

  __device__ __forceinline__ Values operator()(Values x, Values weight, Values bias) const {
    float f[Values::kElements], w[Values::kElements], b[Values::kElements];
    x.forget();
    x.unpack(f);
    weight.forget();
    weight.unpack(w);
    if constexpr (kLayer) {
      bias.forget();
      bias.unpack(b);
    }
#pragma unroll
    for (int i = 0; i < Values::kElements; ++i) {
      if constexpr (kLayer) {
        const float standard = kMultiplied ? fmaf(f[i], rstd_, shift_) : (f[i] - shift_) * rstd_;
        f[i] = fmaf(standard, w[i], b[i]);
      } else {
        f[i] = f[i] * rstd_ * w[i];
      }
    }
    Values result;
    result.pack(f);
    return result;
  }

 private:
  static constexpr bool kMultiplied = Format::kBytes == 2;
  float rstd_, shift_;
};

}  // namespace tiercel

#endif  // KERNELS_NORM_PARAMETERS_CUH_
