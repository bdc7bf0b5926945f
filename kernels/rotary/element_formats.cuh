// SPDX-License-Identifier: Apache-2.0
// Elements of q, k and v as float32 values and back, in words and one by one.
#ifndef KERNELS_ROTARY_ELEMENT_FORMATS_CUH_
#define KERNELS_ROTARY_ELEMENT_FORMATS_CUH_

#include <cstdint>

#include "kernels/sm90/vector.cuh"

namespace tiercel {

struct Float32Element {
  using Bits = uint32_t;
  static constexpr int kBytes = 4;
  static __device__ __forceinline__ float widen(uint32_t bits) { return __uint_as_float(bits); }
  static __device__ __forceinline__ uint32_t narrow(float value) { return __float_as_uint(value); }
};

struct BFloat16Element {
  using Bits = uint16_t;
  static constexpr int kBytes = 2;
  static __device__ __forceinline__ float widen(uint32_t bits) {
    return bfloat16_bits_to_float(bits);
  }
  static __device__ __forceinline__ uint32_t narrow(float value) {
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
};

struct Float16Element {
  using Bits = uint16_t;
  static constexpr int kBytes = 2;
  static __device__ __forceinline__ float widen(uint32_t bits) {
    return float16_bits_to_float(bits);
  }
  static __device__ __forceinline__ uint32_t narrow(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
};

// kCount elements side by side: one vector, or one element.
template <typename Element, int kCount>
__device__ __forceinline__ void load_elements(float (&values)[kCount], const char* address) {
  if constexpr (kCount == 1) {
    values[0] = Element::widen(*reinterpret_cast<const typename Element::Bits*>(address));
  } else {
    constexpr int kPerWord = 4 / Element::kBytes;
    constexpr int kWords = kCount / kPerWord;
    if constexpr (kWords > 4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float part[kCount / 2];
        load_elements<Element>(part, address + half * (kCount / 2) * Element::kBytes);
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) values[half * (kCount / 2) + i] = part[i];
      }
    } else {
      uint32_t words[kWords];
      load_vector(words, address);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const uint32_t word = words[i / kPerWord];
        if constexpr (kPerWord == 1) {
          values[i] = Element::widen(word);
        } else {
          values[i] = Element::widen(i % 2 ? word >> 16 : word & 0xffffu);
        }
      }
    }
  }
}

template <typename Element, int kCount>
__device__ __forceinline__ void store_elements(char* address, const float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    *reinterpret_cast<typename Element::Bits*>(address) =
        static_cast<typename Element::Bits>(Element::narrow(values[0]));
  } else {
    constexpr int kPerWord = 4 / Element::kBytes;
    uint32_t words[kCount / kPerWord];
#pragma unroll
    for (int i = 0; i < kCount / kPerWord; ++i) {
      words[i] = Element::narrow(values[i * kPerWord]);
      if constexpr (kPerWord == 2) words[i] |= Element::narrow(values[i * 2 + 1]) << 16;
    }
    store_vector(address, words);
  }
}

}  // namespace tiercel

#endif  // KERNELS_ROTARY_ELEMENT_FORMATS_CUH_
