// SPDX-License-Identifier: Apache-2.0
// 4-bit weights and their scales as nvfp4_linear's kernels use them: a lane has 32 consecutive
// values of a row at a time (a unit), two units per line of K.
#ifndef KERNELS_GEMV_W4_FEW_WEIGHTS_CUH_
#define KERNELS_GEMV_W4_FEW_WEIGHTS_CUH_

#include <cstdint>

#include "kernels/gemv/nvfp4_weights.cuh"
#include "kernels/gemv/w4_weights.cuh"

namespace tiercel {

// The scales of a lane's two units of a row, and their zero points, as in memory.
template <W4Format kFormat>
struct LineScales {
  uint32_t scale = 0;
  uint32_t zero = 0;

  // `group` counts 16 values of K.
  __device__ __forceinline__ void read(const W4Scales& all, const char* scales, const char* zeros,
                                       int group) {
    if constexpr (kFormat == W4Format::kNvfp4) {
      scale = *reinterpret_cast<const uint32_t*>(scales + group);
    } else if constexpr (kFormat == W4Format::kMxfp4) {
      scale = load_half_word(scales + group / 2);
    } else {
      const int first = (group >> (all.group_shift - 4)) * 2;
      const int second = (group + 2 >> (all.group_shift - 4)) * 2;
      scale = load_half_word(scales + first) | load_half_word(scales + second) << 16;
      if (all.zero != nullptr) {
        zero = load_half_word(zeros + first) | load_half_word(zeros + second) << 16;
      }
    }
  }

  // The scales of the unit's first and second 16 values, as float32.
  __device__ __forceinline__ float2 wide(int unit) const {
    if constexpr (kFormat == W4Format::kNvfp4) {
      return wide_scales(unit == 0 ? scale : scale >> 16);
    } else if constexpr (kFormat == W4Format::kMxfp4) {
      const uint32_t exponent = scale >> unit * 8 & 0xff;
      // 2^-127 is not a normal number, and 255 stands for NaN.
      const uint32_t odd = exponent == 0 || exponent == 255 ? 1u << 22 : 0u;
      const float factor = __uint_as_float(exponent << 23 | odd);
      return {factor, factor};
    } else {
      const float factor = __uint_as_float(unit == 0 ? scale << 16 : scale & 0xffff0000u);
      return {factor, factor};
    }
  }

  // These scales as pairs of bfloat16, times the power of 2 that the weights' bits lack.
  __device__ __forceinline__ void pairs(uint32_t (&factors)[2], int unit) const {
    if constexpr (kFormat == W4Format::kNvfp4) {
      spread_scales(factors, unit == 0 ? scale : scale >> 16);
    } else if constexpr (kFormat == W4Format::kMxfp4) {
      factors[0] = factors[1] = exponent_pair(scale >> unit * 8 & 0xff);
    } else {
      factors[0] = factors[1] = spread(scale, unit);
    }
  }

  // The addend of a unit's whole numbers: their zero point and kWhole, negated.
  template <bool kBFloat16>
  __device__ __forceinline__ uint32_t offset(const W4Scales& all, int unit) const {
    if (all.zero == nullptr) return kMinusEight<kBFloat16>;
    uint32_t negated = spread(zero, unit) ^ 0x80008000u;
    if constexpr (!kBFloat16) {
      const float zero_point = __uint_as_float(negated << 16);
      asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(negated) : "f"(zero_point));
    }
    return pairs_plus<kBFloat16>(kMinusWhole<kBFloat16>, negated);
  }
};

// Eight weights, in the order 0 4, 2 6, 1 5, 3 7; `offset` is of whole numbers.
template <W4Format kFormat, bool kBFloat16>
__device__ __forceinline__ void decode_word(uint32_t (&pairs)[4], uint32_t word, uint32_t offset) {
  if constexpr (kFormat == W4Format::kInt4) {
    constexpr int kShifts[] = {0, 8, 4, 12};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t whole = (word >> kShifts[i] & 0x000f000fu) | kWhole<kBFloat16>;
      pairs[i] = pairs_plus<kBFloat16>(whole, offset);
    }
  } else if constexpr (kBFloat16) {
    decode_wide(pairs, word);
  } else {
    decode(pairs, word);
  }
}

}  // namespace tiercel

#endif  // KERNELS_GEMV_W4_FEW_WEIGHTS_CUH_
