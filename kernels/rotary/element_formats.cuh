// SPDX-License-Identifier: Apache-2.0
// Conversion of elements of q, k and v between memory format and float32.
#ifndef KERNELS_ROTARY_ELEMENT_FORMATS_CUH_
#define KERNELS_ROTARY_ELEMENT_FORMATS_CUH_

#include <cstdint>

#include "kernels/sm90/vector.cuh"

namespace tiercel {

struct Float32Element {
  using Bits = uint32_t;
  static constexpr int kBytes = 4;
  static __device__ __forceinline__ float low(uint32_t word) { return __uint_as_float(word); }
  static __device__ __forceinline__ uint32_t narrow(float value) { return __float_as_uint(value); }
};

struct BFloat16Element {
  using Bits = uint16_t;
  static constexpr int kBytes = 2;
  static __device__ __forceinline__ float low(uint32_t word) {
    return bfloat16_bits_to_float(word);
  }
  static __device__ __forceinline__ float high(uint32_t word) {
    return __uint_as_float(word & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32_t narrow(float low, float high = 0.0f) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
};

struct Float16Element {
  using Bits = uint16_t;
  static constexpr int kBytes = 2;
  static __device__ __forceinline__ float low(uint32_t word) {
    return float16_bits_to_float(word & 0xffffu);
  }
  static __device__ __forceinline__ float high(uint32_t word) {
    return float16_bits_to_float(word >> 16);
  }
  static __device__ __forceinline__ uint32_t narrow(float low, float high = 0.0f) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
};

// kCount adjacent elements: one element, or 4 to 32 bytes.
template <typename Element, int kCount>
struct Packed {
  static constexpr int kPerWord = kCount == 1 ? 1 : 4 / Element::kBytes;
  static constexpr int kWords = kCount / kPerWord;

  uint32_t words[kWords];

  __device__ __forceinline__ void load(const char* address) {
    if constexpr (kCount == 1) {
      words[0] = *reinterpret_cast<const typename Element::Bits*>(address);
    } else if constexpr (kWords == 8) {
      load_vector(reinterpret_cast<uint32_t (&)[4]>(words[0]), address);
      load_vector(reinterpret_cast<uint32_t (&)[4]>(words[4]), address + 16);
    } else {
      load_vector(words, address);
    }
  }
  __device__ __forceinline__ void store(char* address) const {
    if constexpr (kCount == 1) {
      *reinterpret_cast<typename Element::Bits*>(address) =
          static_cast<typename Element::Bits>(words[0]);
    } else {
      store_vector(address, words);
    }
  }
  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (kPerWord == 1) {
      return Element::low(words[i]);
    } else {
      return i % 2 ? Element::high(words[i / 2]) : Element::low(words[i / 2]);
    }
  }
  __device__ __forceinline__ void round(const float (&values)[kCount]) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (kPerWord == 1) {
        words[w] = Element::narrow(values[w]);
      } else {
        words[w] = Element::narrow(values[2 * w], values[2 * w + 1]);
      }
    }
  }
};

}  // namespace tiercel

#endif  // KERNELS_ROTARY_ELEMENT_FORMATS_CUH_
