// SPDX-License-Identifier: Apache-2.0
// 4-bit weights as e4m3 operands of wgmma, in registers: bytes are looked up with byte
// permutations.
#ifndef KERNELS_GEMV_W4_FLOAT8_WEIGHTS_CUH_
#define KERNELS_GEMV_W4_FLOAT8_WEIGHTS_CUH_

#include <cstdint>

#include "kernels/gemv/nvfp4_weights.cuh"
#include "kernels/sm90/narrow_floats.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {

// The instruction itself: unlike __byte_perm, bit 3 of a selector repeats a byte's upper bit.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

// e2m1's magnitudes times 2^(6 - down) as bytes of e4m3. Exact up to 14.
struct MagnitudeTable {
  uint32_t low, high;
};

inline constexpr int kExactShift = 11;    // beyond, numbers are below normal
inline constexpr int kLargestShift = 19;  // all round to 0
inline constexpr int kScaledUp = 6;

// The tables of shifts 12 to 19: thread i of 64 writes a byte.
__device__ __forceinline__ void write_small_magnitudes(uint8_t* bytes, int i) {
  const int down = kExactShift + 1 + i / 8, code = i % 8;
  const float magnitude = code < 2 ? code * 0.5f : ldexpf(1.0f + code % 2 * 0.5f, code / 2 - 1);
  bytes[i] = float2_to_e4m3x2(ldexpf(magnitude, kScaledUp - down), 0.0f) & 0xff;
}

__device__ __forceinline__ MagnitudeTable magnitudes(uint32_t down, uint32_t small_tables) {
  MagnitudeTable table{0x6c686000u - down * 0x08080800u, 0x7c787470u - down * 0x08080808u};
  const uint32_t address =
      small_tables + (min(down, uint32_t{kLargestShift}) - (kExactShift + 1)) * 8;
  // Rare: a predicated load is no branch among products in flight.
  asm volatile(
      "{ .reg .pred small; setp.gt.u32 small, %2, %3; @small ld.shared.v2.u32 {%0, %1}, [%4]; }"
      : "+r"(table.low), "+r"(table.high)
      : "r"(down), "n"(kExactShift), "r"(address));
  return table;
}

// Eight e2m1 of a word: two words of four e4m3.
__device__ __forceinline__ void look_up(uint32_t& first, uint32_t& second, uint32_t word,
                                        const MagnitudeTable& table) {
  constexpr uint32_t kSigns = 0x80808080u;
  const uint32_t codes = word & 0x77777777u, even = word << 4;
  // Signs are the upper bits of `word`'s bytes, or of `even`'s.
  first = select_bits(permute_bytes(word, even, 0x1504),
                      permute_bytes(table.low, table.high, codes), kSigns);
  second = select_bits(permute_bytes(word, even, 0x3726),
                       permute_bytes(table.low, table.high, codes >> 16), kSigns);
}

// The numbers 0 to 15 less a zero point: byte `number` of the table of a zero point.
__device__ __forceinline__ void write_number(uint8_t* bytes, int zero_point, int number) {
  const auto value = static_cast<float>(number - zero_point);
  bytes[zero_point * 16 + number] = float2_to_e4m3x2(value, 0.0f) & 0xff;
}

// Eight whole numbers of a word by the table of their zero point.
__device__ __forceinline__ void look_up(uint32_t& first, uint32_t& second, uint32_t word,
                                        const uint4& table) {
  const uint32_t codes = word & 0x77777777u, even = word << 4;
  const auto four = [&](uint32_t selector, uint32_t above) {
    return select_bits(permute_bytes(table.z, table.w, selector),
                       permute_bytes(table.x, table.y, selector), permute_bytes(word, even, above));
  };
  first = four(codes, 0x9d8c);
  second = four(codes >> 16, 0xbfae);
}

__device__ __forceinline__ float wide_half(uint32_t bits, bool float16) {
  return float16 ? float16_bits_to_float(bits) : bfloat16_bits_to_float(bits);
}

// A zero point's table; only 0 to 15 have one, and NaN counts as 0.
__device__ __forceinline__ int zero_point_index(uint32_t bits, bool float16) {
  return __float2int_rn(wide_half(bits, float16)) & 15;
}

}  // namespace tiercel

#endif  // KERNELS_GEMV_W4_FLOAT8_WEIGHTS_CUH_
