// SPDX-License-Identifier: Apache-2.0
// 4-bit weights as operands of wgmma, in registers. A lane's words hold 8 neighbouring values of K,
// of which it multiplies the two in byte lane % 4.
#ifndef KERNELS_GEMV_W4_WEIGHTS_CUH_
#define KERNELS_GEMV_W4_WEIGHTS_CUH_

#include <cstdint>

#include "kernels/gemv/nvfp4_weights.cuh"
#include "kernels/gemv/w4_format.h"

namespace tiercel {

// Pairs of the kernel's 16-bit type.
template <bool kBFloat16>
__device__ __forceinline__ uint32_t pairs_times(uint32_t a, uint32_t b) {
  uint32_t product;
  if constexpr (kBFloat16) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  }
  return product;
}

template <bool kBFloat16>
__device__ __forceinline__ uint32_t pairs_plus(uint32_t a, uint32_t b) {
  uint32_t sum;
  if constexpr (kBFloat16) {
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  } else {
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  }
  return sum;
}

// 128 or 1024 as a pair, whose last bits are whole numbers; and its negative.
template <bool kBFloat16>
inline constexpr uint32_t kWhole = kBFloat16 ? 0x43004300u : 0x64006400u;
template <bool kBFloat16>
inline constexpr uint32_t kMinusWhole = kWhole<kBFloat16> | 0x80008000u;

// That number less 8, the zero point of weights without others.
template <bool kBFloat16>
inline constexpr uint32_t kMinusEight = kBFloat16 ? 0xc308c308u : 0xe408e408u;

// The powers of two that decoded weights times their scales lack: e2m1's bits are moved into a
// wider exponent, and the scale makes up for most of that.
template <bool kBFloat16>
__device__ __forceinline__ float missing_power(W4Format format) {
  return format == W4Format::kInt4 ? 1.0f : format == W4Format::kNvfp4 ? 0x1p7f : 0x1p64f;
}

// Picks a lane's bytes out of two words, for decode_bytes().
template <bool kFloats>
__device__ __forceinline__ uint32_t byte_choice(uint32_t byte) {
  return kFloats ? (4 + byte) | byte << 4 | (4 + byte) << 12 : byte | (4 + byte) << 8 | byte << 12;
}

// The two weights in the lane's byte of `first`, and in that of `second`. e2m1 are times 2^-126
// (bfloat16) or 2^-14 (float16), whole numbers have kWhole added.
template <bool kFloats, bool kBFloat16>
__device__ __forceinline__ void decode_bytes(uint32_t (&pairs)[2], uint32_t first, uint32_t second,
                                             uint32_t choice, uint32_t whole = kWhole<kBFloat16>) {
  const uint32_t bytes = __byte_perm(first, second, choice);
  if constexpr (kFloats) {
    // Each half: the first word's value, then the second's, in the upper byte.
    const uint32_t both = select_bits(bytes, bytes << 12, 0xf0000f00u);
    if constexpr (kBFloat16) {
      constexpr uint32_t kBits = 0x81c081c0u;
      const uint32_t placed = select_bits(both, both >> 6, 0x88008800u);
      pairs[0] = placed << 4 & kBits;
      pairs[1] = placed & kBits;
    } else {
      constexpr uint32_t kSigns = 0x80008000u, kBits = 0x8e008e00u;
      pairs[0] = select_bits(both << 4, both << 1, kSigns) & kBits;
      pairs[1] = select_bits(both, both >> 3, kSigns) & kBits;
    }
  } else {
    const uint32_t both = select_bits(bytes, bytes >> 12, 0x00f0000fu);
    pairs[0] = (both & 0x000f000fu) | whole;
    pairs[1] = (both >> 4 & 0x000f000fu) | whole;
  }
}

// The scale 2^(exponent - 127) as two bfloat16, times 2^62. Those above 2^65 become infinite; 255
// stands for NaN.
__device__ __forceinline__ uint32_t exponent_pair(uint32_t exponent) {
  const uint32_t scale = min(exponent + 62, 255u) << 7 | (exponent == 255 ? 0x40 : 0);
  return scale * 0x10001u;
}

// Two e4m3 as a pair, times the power of two that decoded e2m1 lack but for missing_power().
template <bool kBFloat16>
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t two) {
  uint32_t pair;
  if constexpr (kBFloat16) {
    const float2 wide = wide_scales(two);
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(wide.y), "f"(wide.x));
    return multiply_pairs(pair, 0x7b007b00u);  // 2^119
  } else {
    asm("{ .reg .b16 two; cvt.u16.u32 two, %1; cvt.rn.f16x2.e4m3x2 %0, two; }"
        : "=r"(pair)
        : "r"(two));
    return pairs_times<false>(pair, 0x58005800u);  // 2^7
  }
}

// A row's scales of a step of K. e2m1's: 16-bit floats, those of 16 and of the next 16 values in a
// word. Whole numbers': those of 32 and of the next 32, and the zero points with kWhole, negated.
template <bool kFloats>
struct StepScales {
  uint32_t scale[kFloats ? 4 : 2];
  uint32_t zero[kFloats ? 1 : 2];

  // The 16 bytes that a row has in shared memory.
  __device__ __forceinline__ uint4 words() const {
    if constexpr (kFloats) return make_uint4(scale[0], scale[1], scale[2], scale[3]);
    return make_uint4(scale[0], scale[1], zero[0], zero[1]);
  }
  __device__ __forceinline__ void set(uint4 words) {
    scale[0] = words.x, scale[1] = words.y;
    if constexpr (kFloats) {
      scale[2] = words.z, scale[3] = words.w;
    } else {
      zero[0] = words.z, zero[1] = words.w;
    }
  }
};

// A step's scales and zero points as read from memory.
template <bool kFloats>
struct StepBits {
  uint32_t scale[2];
  // Those of 8 bits have registers of their own: a predicated load waits for an earlier one into
  // the same register.
  uint32_t exponents[kFloats ? 2 : 1];
  uint32_t zero[kFloats ? 1 : 2];
};

// One half of a word, twice.
__device__ __forceinline__ uint32_t spread(uint32_t word, int half) {
  return __byte_perm(word, 0, half == 0 ? 0x1010 : 0x3232);
}

// Keeps the compiler from making a loop for each format: products in flight would cross their ends.
__device__ __forceinline__ W4Format opaque_format(const W4Scales& scales) {
  int format = static_cast<int>(scales.format);
  asm volatile("" : "+r"(format));
  return static_cast<W4Format>(format);
}

__device__ __forceinline__ uint32_t load_half_word(const char* from) {
  return *reinterpret_cast<const uint16_t*>(from);
}

// Reads them for the row that begins `row` bytes behind `scale`, and `zero_row` behind `zero`, from
// value k of K on. What lies behind the last value of K is replaced by a scale before it; its
// products are with zeros.
template <bool kFloats>
__device__ __forceinline__ void load_scales(StepBits<kFloats>& bits, const W4Scales& scales,
                                            const char* scale, const char* zero, uint32_t row,
                                            uint32_t zero_row, int k, int last_k) {
  const int shift = scales.group_shift;
  if constexpr (kFloats) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // All rows share this pointer, so each row's address takes one addition.
      const char* const from = scale + (min(k + i * 64, last_k - 64) >> shift);
      if (opaque_format(scales) == W4Format::kNvfp4) {
        bits.scale[i] = *reinterpret_cast<const uint32_t*>(from + row);
      } else {
        bits.exponents[i] = load_half_word(from + row);
      }
    }
  } else {
    const auto load = [&](const char* from, uint32_t row, int k) {
      return load_half_word(from + (min(k, last_k - 32) >> shift) * 2 + row);
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 1 && shift == 7) {
        bits.scale[1] = bits.scale[0];
        bits.zero[1] = bits.zero[0];
        continue;
      }
      const int at = k + i * 64, next = shift == 5 ? at + 32 : at;
      bits.scale[i] = load(scale, row, at) | load(scale, row, next) << 16;
      if (zero != nullptr) {
        bits.zero[i] = load(zero, zero_row, at) | load(zero, zero_row, next) << 16;
      }
    }
  }
}

template <bool kFloats, bool kBFloat16>
__device__ __forceinline__ void unpack_scales(StepScales<kFloats>& to,
                                              const StepBits<kFloats>& bits,
                                              const W4Scales& scales) {
  if constexpr (!kFloats) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to.scale[i] = bits.scale[i];
      to.zero[i] = scales.zero == nullptr
                       ? kMinusEight<kBFloat16>
                       : pairs_plus<kBFloat16>(kMinusWhole<kBFloat16>, bits.zero[i] ^ 0x80008000u);
    }
  } else if (opaque_format(scales) == W4Format::kNvfp4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to.scale[i] = e4m3_pair<kBFloat16>(bits.scale[i / 2] >> i % 2 * 16);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to.scale[i] = exponent_pair(bits.exponents[i / 2] >> i % 2 * 8 & 0xff);
    }
  }
}

// Decoded pairs, of the `sixteen`th 16 values of K in the step, times their scale.
template <bool kFloats, bool kBFloat16>
__device__ __forceinline__ void scale_pairs(uint32_t (&pairs)[2], const StepScales<kFloats>& scales,
                                            int sixteen) {
  const int at = kFloats ? sixteen : sixteen / 2;
  const uint32_t scale = spread(scales.scale[at / 2], at % 2);
#pragma unroll
  for (uint32_t& pair : pairs) {
    if constexpr (!kFloats) {
      pair = pairs_plus<kBFloat16>(pair, spread(scales.zero[at / 2], at % 2));
    }
    pair = pairs_times<kBFloat16>(pair, scale);
  }
}

}  // namespace tiercel

#endif  // KERNELS_GEMV_W4_WEIGHTS_CUH_
