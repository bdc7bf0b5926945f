// SPDX-License-Identifier: Apache-2.0
// Element types as 32-bit words in memory and float32 in registers.
#ifndef KERNELS_SM90_FLOAT_FORMAT_CUH_
#define KERNELS_SM90_FLOAT_FORMAT_CUH_

#include <cstdint>

#include "kernels/sm90/vector.cuh"

namespace tiercel {

struct Float32 {
  using Storage = uint32_t;
  static constexpr int kBytes = 4;
  static constexpr int kPerWord = 1;
  static __device__ __forceinline__ float from_bits(uint32_t bits) { return __uint_as_float(bits); }
  static __device__ __forceinline__ uint32_t to_bits(float value) { return __float_as_uint(value); }
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = __uint_as_float(word);
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    return __float_as_uint(values[0]);
  }
};

struct BFloat16 {
  using Storage = uint16_t;
  static constexpr int kBytes = 2;
  static constexpr int kPerWord = 2;
  static __device__ __forceinline__ float from_bits(uint32_t bits) {
    return bfloat16_bits_to_float(bits);
  }
  static __device__ __forceinline__ uint32_t to_bits(float value) {
    const float pair[2] = {value, 0.0f};
    return pack(pair) & 0xffffu;
  }
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
  }
  // The larger of each of two pairs; passes over NaN.
  static __device__ __forceinline__ uint32_t max_pairs(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
  }
  // Rounds as the sum in float32 does.
  static __device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b) {
    uint32_t sum;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    return word;
  }
};

struct Float16 {
  using Storage = uint16_t;
  static constexpr int kBytes = 2;
  static constexpr int kPerWord = 2;
  static __device__ __forceinline__ float from_bits(uint32_t bits) {
    return float16_bits_to_float(bits);
  }
  static __device__ __forceinline__ uint32_t to_bits(float value) {
    const float pair[2] = {value, 0.0f};
    return pack(pair) & 0xffffu;
  }
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = float16_bits_to_float(word);
    values[1] = float16_bits_to_float(word >> 16);
  }
  // The larger of each of two pairs; passes over NaN.
  static __device__ __forceinline__ uint32_t max_pairs(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
  }
  // Rounds as the sum in float32 does.
  static __device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b) {
    uint32_t sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    return word;
  }
};

// Finite values beyond 448 become 448, infinities too; NaN stays NaN. Only packed, never read.
struct Float8E4M3 {
  using Storage = uint8_t;
  static constexpr int kBytes = 1;
  static constexpr int kPerWord = 4;
  static __device__ __forceinline__ uint32_t pack_pair(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
  }
  static __device__ __forceinline__ uint32_t to_bits(float value) {
    return pack_pair(value, 0.0f) & 0xffu;
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    return pack_pair(values[0], values[1]) | pack_pair(values[2], values[3]) << 16;
  }
};

// A 16-byte load where it stands in the program: with others before and after it, all are under way
// at once. Plain on purpose: in a kernel that also writes, `L1::no_allocate`, `evict_first` and
// `.cs` cost 4 to 9 % of a copy's speed (measured on an H200).
__device__ __forceinline__ void load_stream(uint32_t (&words)[4], const void* address) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(address));
}

// Loads of data that is touched once, in kernels that write next to nothing: L1 keeps none of it.
template <int kWords>
__device__ __forceinline__ void load_vector_once(uint32_t (&words)[kWords], const void* address) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4, "one load moves 4, 8 or 16 bytes");
  if constexpr (kWords == 4) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(address));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(address));
  } else {
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(words[0]) : "l"(address));
  }
}

// kWords words as floats, and back.
template <typename Format, int kWords>
__device__ __forceinline__ void unpack(const uint32_t (&words)[kWords],
                                       float (&values)[kWords * Format::kPerWord]) {
#pragma unroll
  for (int w = 0; w < kWords; ++w) Format::unpack(words[w], &values[w * Format::kPerWord]);
}

template <typename Format, int kWords>
__device__ __forceinline__ void pack(const float (&values)[kWords * Format::kPerWord],
                                     uint32_t (&words)[kWords]) {
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = Format::pack(&values[w * Format::kPerWord]);
}

// One element of any address.
template <typename Format>
__device__ __forceinline__ float load_element(const void* address) {
  return Format::from_bits(*static_cast<const typename Format::Storage*>(address));
}

template <typename Format>
__device__ __forceinline__ void store_element(void* address, float value) {
  *static_cast<typename Format::Storage*>(address) =
      static_cast<typename Format::Storage>(Format::to_bits(value));
}

}  // namespace tiercel

#endif  // KERNELS_SM90_FLOAT_FORMAT_CUH_
