// SPDX-License-Identifier: Apache-2.0
// Loads and stores of 16, 8 or 4 bytes, and conversions of 16-bit floats, without the toolkit's
// large headers.
#ifndef KERNELS_SM90_VECTOR_CUH_
#define KERNELS_SM90_VECTOR_CUH_

#include <cstdint>

namespace tiercel {

// Reads kWords 32-bit words with one instruction; `address` is a multiple of their size.
template <int kWords>
__device__ __forceinline__ void load_vector(uint32_t (&words)[kWords], const void* address) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4, "one load moves 4, 8 or 16 bytes");
  if constexpr (kWords == 4) {
    const uint4 v = *static_cast<const uint4*>(address);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (kWords == 2) {
    const uint2 v = *static_cast<const uint2*>(address);
    words[0] = v.x, words[1] = v.y;
  } else {
    words[0] = *static_cast<const uint32_t*>(address);
  }
}

// A 16-byte load that the compiler does not move, so that several in a row are in flight at once.
// Without cache hints: in a kernel that also writes, `L1::no_allocate`, `evict_first` and `.cs`
// cost 4 to 9 % of a copy's speed (measured on an H200).
__device__ __forceinline__ void load_stream(uint32_t (&words)[4], const void* address) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(address));
}

template <int kWords>
__device__ __forceinline__ void store_vector(void* address, const uint32_t (&words)[kWords]) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4, "one store moves 4, 8 or 16 bytes");
  if constexpr (kWords == 4) {
    *static_cast<uint4*>(address) = make_uint4(words[0], words[1], words[2], words[3]);
  } else if constexpr (kWords == 2) {
    *static_cast<uint2*>(address) = make_uint2(words[0], words[1]);
  } else {
    *static_cast<uint32_t*>(address) = words[0];
  }
}

__device__ __forceinline__ float bfloat16_bits_to_float(uint32_t bits) {
  return __uint_as_float(bits << 16);
}

__device__ __forceinline__ float float16_bits_to_float(uint32_t bits) {
  float value;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(bits));
  return value;
}

}  // namespace tiercel

#endif  // KERNELS_SM90_VECTOR_CUH_
