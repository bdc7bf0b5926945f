// SPDX-License-Identifier: Apache-2.0
// Elements as raw words: loaded and stored 16 bytes or one element at a time, unpacked to float,
// rounded back.
#ifndef KERNELS_NORM_ELEMENTS_CUH_
#define KERNELS_NORM_ELEMENTS_CUH_

#include <cstdint>

#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {

// From shared memory. `address` is as shared_address() has it, a multiple of the words' size:
// made once, it costs less than a pointer that is made again at each use.
__device__ __forceinline__ void load_shared(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_shared(uint32_t& word, uint32_t address) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
}

// What one access moves: 16 bytes (kWide) or one element.
template <typename Format, bool kWide>
struct Chunk {
  static constexpr int kElements = kWide ? 16 / Format::kBytes : 1;
  static constexpr int kWords = kWide ? 4 : 1;
  static constexpr int kBytes = kElements * Format::kBytes;

  uint32_t words[kWords];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = 0;
  }

  __device__ __forceinline__ void fill(float value) {
    float same[kElements];
#pragma unroll
    for (float& one : same) one = value;
    pack(same);
  }

  __device__ __forceinline__ void load(const char* address) {
    if constexpr (kWide) {
      load_stream(words, address);
    } else {
      load_any(address);
    }
  }

  // From shared memory, or through the L1.
  __device__ __forceinline__ void load_any(const char* address) {
    if constexpr (kWide) {
      load_vector(words, address);
    } else {
      words[0] = *reinterpret_cast<const typename Format::Storage*>(address);
    }
  }

  __device__ __forceinline__ void store(char* address) const {
    if constexpr (kWide) {
      store_vector(address, words);
    } else {
      *reinterpret_cast<typename Format::Storage*>(address) =
          static_cast<typename Format::Storage>(words[0]);
    }
  }

  // Of 16 bits.
  __device__ __forceinline__ void add(const Chunk& other) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = Format::add_pairs(words[w], other.words[w]);
  }

  // Keeps the compiler from holding unpacked values from one use to the next: twice the registers.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int w = 0; w < kWords; ++w) asm volatile("" : "+r"(words[w]));
  }

  __device__ __forceinline__ void unpack(float (&values)[kElements]) const {
    if constexpr (kWide) {
      tiercel::unpack<Format>(words, values);
    } else {
      values[0] = Format::from_bits(words[0]);
    }
  }

  __device__ __forceinline__ void pack(const float (&values)[kElements]) {
    if constexpr (kWide) {
      tiercel::pack<Format>(values, words);
    } else {
      words[0] = Format::to_bits(values[0]);
    }
  }
};

}  // namespace tiercel

#endif  // KERNELS_NORM_ELEMENTS_CUH_
