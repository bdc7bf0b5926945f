// SPDX-License-Identifier: Apache-2.0
// Elements as raw words: loaded and stored 16 bytes or one element at a time, unpacked to float,
// rounded back.
#ifndef KERNELS_NORM_ELEMENTS_CUH_
#define KERNELS_NORM_ELEMENTS_CUH_

#include <cstdint>

#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {

// Loads from shared memory. `address` comes from shared_address() and is a multiple of the words'
// size; computed once, it costs less than a pointer that is converted at each use.
__device__ __forceinline__ void load_shared(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_shared(uint32_t& word, uint32_t address) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
}

// The elements of one access: 16 bytes (kAligned16) or one element.
template <typename Format, bool kAligned16>
struct Chunk {
  static constexpr int kElements = kAligned16 ? 16 / Format::kBytes : 1;
  static constexpr int kWords = kAligned16 ? 4 : 1;
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
    if constexpr (kAligned16) {
      load_stream(words, address);
    } else {
      load_any(address);
    }
  }

  // Loads from shared memory, or through the L1.
  __device__ __forceinline__ void load_any(const char* address) {
    if constexpr (kAligned16) {
      load_vector(words, address);
    } else {
      words[0] = *reinterpret_cast<const typename Format::Storage*>(address);
    }
  }

  __device__ __forceinline__ void store(char* address) const {
    if constexpr (kAligned16) {
      store_vector(address, words);
    } else {
      *reinterpret_cast<typename Format::Storage*>(address) =
          static_cast<typename Format::Storage>(words[0]);
    }
  }

  // For 16-bit elements.
  __device__ __forceinline__ void add(const Chunk& other) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = Format::add_pairs(words[w], other.words[w]);
  }

  // Keeps the compiler from holding the unpacked values between two uses, which takes twice the
  // registers.
  __device__ __forceinline__ void drop_unpacked_copies() {
#pragma unroll
    for (int w = 0; w < kWords; ++w) asm volatile("" : "+r"(words[w]));
  }

  __device__ __forceinline__ void unpack(float (&values)[kElements]) const {
    if constexpr (kAligned16) {
      tiercel::unpack<Format>(words, values);
    } else {
      values[0] = Format::from_bits(words[0]);
    }
  }

  __device__ __forceinline__ void pack(const float (&values)[kElements]) {
    if constexpr (kAligned16) {
      tiercel::pack<Format>(values, words);
    } else {
      words[0] = Format::to_bits(values[0]);
    }
  }
};

}  // namespace tiercel

#endif  // KERNELS_NORM_ELEMENTS_CUH_
