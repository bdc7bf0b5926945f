// SPDX-License-Identifier: Apache-2.0
// Reading a norm's weight and bias, and prefetching them before they may be read.
#ifndef KERNELS_NORM_PARAMETERS_CUH_
#define KERNELS_NORM_PARAMETERS_CUH_

#include "kernels/norm/elements.cuh"
#include "kernels/norm/moments.cuh"
#include "kernels/norm/norm_kernels.h"
#include "kernels/sm90/prefetch.h"

namespace tiercel {

// Reads a vector of weight or bias as float32.
template <typename Format, bool kAligned16>
__device__ __forceinline__ void read_parameter(
    float (&values)[Chunk<Format, kAligned16>::kElements], const char* data, bool float32,
    int column) {
  if (float32) {
    const float* const from = reinterpret_cast<const float*>(data) + column;
    if constexpr (kAligned16) {
#pragma unroll
      for (int p = 0; p < Chunk<Format, kAligned16>::kElements / 4; ++p) {
        const float4 part = reinterpret_cast<const float4*>(from)[p];
        values[4 * p] = part.x, values[4 * p + 1] = part.y;
        values[4 * p + 2] = part.z, values[4 * p + 3] = part.w;
      }
    } else {
      values[0] = *from;
    }
  } else {
    Chunk<Format, kAligned16> chunk;
    chunk.load_any(data + column * Format::kBytes);
    chunk.unpack(values);
  }
}

// Only the first rows' threads prefetch: all blocks requesting the same lines would take long.
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

// Reads a vector of weight or bias as it is in memory, at `offset` bytes; `absent` if there is no
// such parameter.
template <typename Format>
__device__ __forceinline__ void read_packed(Chunk<Format, true>& vector, const char* data,
                                            int offset, float absent) {
  if (data != nullptr) {
    vector.load(data + offset);
  } else {
    vector.fill(absent);
  }
}

// Normalises a row's vectors with its statistics. An RMS norm has neither mean nor bias.
template <typename Format, bool kLayer>
class Normaliser {
 public:
  using Values = Chunk<Format, true>;

  // Subtract `about` first: x * rstd - about * rstd would cancel. `shift` is minus the mean's
  // distance from `about`, times rstd.
  __device__ __forceinline__ Normaliser(float about, float rstd, float shift)
      : about_(about), rstd_(rstd), shift_(shift) {}
  __device__ __forceinline__ Normaliser(RowMoments row, float rstd)
      : Normaliser(row.about, rstd, -row.apart * rstd) {}

  __device__ __forceinline__ Values operator()(Values x, Values weight, const Values& bias) const {
    float f[Values::kElements], w[Values::kElements], b[Values::kElements];
    x.drop_unpacked_copies();
    x.unpack(f);
    weight.drop_unpacked_copies();
    weight.unpack(w);
    if constexpr (kLayer) {
      Values own = bias;  // uninitialised for an RMS norm
      own.drop_unpacked_copies();
      own.unpack(b);
    }
#pragma unroll
    for (int i = 0; i < Values::kElements; ++i) {
      if constexpr (kLayer) {
        f[i] = fmaf(fmaf(f[i] - about_, rstd_, shift_), w[i], b[i]);
      } else {
        f[i] = f[i] * rstd_ * w[i];
      }
    }
    Values result;
    result.pack(f);
    return result;
  }

 private:
  float about_, rstd_, shift_;
};

}  // namespace tiercel

#endif  // KERNELS_NORM_PARAMETERS_CUH_
