// SPDX-License-Identifier: Apache-2.0
// Element types as 32-bit words in memory and float32 in registers.
#ifndef KERNELS_SM90_FLOAT_FORMAT_CUH_
#define KERNELS_SM90_FLOAT_FORMAT_CUH_

#include <cstdint>

#include "kernels/sm90/narrow_floats.cuh"
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
  // Element-wise maximum; a NaN loses to a number.
  static __device__ __forceinline__ uint32_t max_pairs(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
  }
  // Equals the rounded float32 sum.
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
  // Element-wise maximum; a NaN loses to a number.
  static __device__ __forceinline__ uint32_t max_pairs(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
  }
  // Equals the rounded float32 sum.
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

// Magnitudes above 448, infinities included, become 448; NaN stays NaN. For output only.
struct Float8E4M3 {
  using Storage = uint8_t;
  static constexpr int kBytes = 1;
  static constexpr int kPerWord = 4;
  static __device__ __forceinline__ uint32_t to_bits(float value) {
    return float2_to_e4m3x2(value, 0.0f) & 0xffu;
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    return float4_to_e4m3x4(values);
  }
};

// Converts kWords words to floats, and back.
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

// Loads and stores of one element, at any address.
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
