// SPDX-License-Identifier: Apache-2.0
// NVFP4 weights as bfloat16 or float16 in registers.
#ifndef KERNELS_GEMV_NVFP4_WEIGHTS_CUH_
#define KERNELS_GEMV_NVFP4_WEIGHTS_CUH_

#include <cstdint>

namespace tiercel {

// bfloat16 pairs. The product of a weight and its scale is exact.
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Two e4m3 as float32.
__device__ __forceinline__ float2 wide_scales(uint32_t bits) {
  float2 scales;
  asm("{ .reg .b16 pair, low, high; .reg .b32 both; cvt.u16.u32 pair, %2;"
      " cvt.rn.f16x2.e4m3x2 both, pair; mov.b32 {low, high}, both;"
      " cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
      : "=f"(scales.x), "=f"(scales.y)
      : "r"(bits));
  return scales;
}

// Two e4m3 as bfloat16, times 2^119, each twice.
__device__ __forceinline__ void spread_scales(uint32_t (&scales)[2], uint32_t bits) {
  const float2 wide = wide_scales(bits);
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(wide.y), "f"(wide.x));
  pair = multiply_pairs(pair, 0x7b007b00u);
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2;"
      " mov.b32 %0, {low, low}; mov.b32 %1, {high, high}; }"
      : "=r"(scales[0]), "=r"(scales[1])
      : "r"(pair));
}

// The bits of `a` where `mask` is set, else those of `b`, in one instruction; the compiler misses
// it.
__device__ __forceinline__ uint32_t select_bits(uint32_t a, uint32_t b, uint32_t mask) {
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(bits) : "r"(a), "r"(b), "r"(mask));
  return bits;
}

// Eight e2m1 as float16, times 2^-14, in the order 0 4, 2 6, 1 5, 3 7. Each byte of `even` and
// `odd` is the upper half of a float16, apart from bits that the masks clear.
__device__ __forceinline__ void decode(uint32_t (&halves)[4], uint32_t word) {
  constexpr uint32_t kSigns = 0x80808080u;
  constexpr uint32_t kBits = 0x8e008e00u;
  const uint32_t even = select_bits(word << 4, word << 1, kSigns);
  const uint32_t odd = select_bits(word, word >> 3, kSigns);
  halves[0] = even << 8 & kBits;
  halves[1] = even & kBits;
  halves[2] = odd << 8 & kBits;
  halves[3] = odd & kBits;
}

// Eight e2m1 as bfloat16, times 2^-126. Each half of `high` and `low` has two weights in place,
// four bits apart.
__device__ __forceinline__ void decode_wide(uint32_t (&pairs)[4], uint32_t word) {
  constexpr uint32_t kSigns = 0x88008800u;
  constexpr uint32_t kBits = 0x81c081c0u;
  const uint32_t low = select_bits(word << 8, word << 2, kSigns);
  const uint32_t high = select_bits(word, word >> 6, kSigns);
  pairs[0] = low << 4 & kBits;
  pairs[1] = high << 4 & kBits;
  pairs[2] = low & kBits;
  pairs[3] = high & kBits;
}

}  // namespace tiercel

#endif  // KERNELS_GEMV_NVFP4_WEIGHTS_CUH_
