// SPDX-License-Identifier: Apache-2.0
// Conversion of elements to float32 and back, and the two operations that combine them.
#ifndef KERNELS_REDUCE_ACCUMULATE_CUH_
#define KERNELS_REDUCE_ACCUMULATE_CUH_

#include <cstdint>

#include "kernels/reduce/reduce_kernels.h"
#include "kernels/sm90/tensor_view.h"
#include "kernels/sm90/vector.cuh"

namespace tiercel {

struct Float32Format {
  static constexpr int kBytes = 4;
  static constexpr uint32_t kLowest = 0xff800000u;  // -infinity, in each element of a word
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = __uint_as_float(word);
  }
  static __device__ __forceinline__ float load(const char* address) {
    return *reinterpret_cast<const float*>(address);
  }
};

struct BFloat16Format {
  static constexpr int kBytes = 2;
  static constexpr uint32_t kLowest = 0xff80ff80u;
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    return word;
  }
  static __device__ __forceinline__ float load(const char* address) {
    return bfloat16_bits_to_float(*reinterpret_cast<const uint16_t*>(address));
  }
};

struct Float16Format {
  static constexpr int kBytes = 2;
  static constexpr uint32_t kLowest = 0xfc00fc00u;
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = float16_bits_to_float(word & 0xffffu);
    values[1] = float16_bits_to_float(word >> 16);
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    return word;
  }
  static __device__ __forceinline__ float load(const char* address) {
    return float16_bits_to_float(*reinterpret_cast<const uint16_t*>(address));
  }
};

struct SumOf {
  static constexpr bool kMax = false;
  static __device__ __forceinline__ float none() { return 0.0f; }
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// NaN if either is.
struct MaxOf {
  static constexpr bool kMax = true;
  static __device__ __forceinline__ float none() { return __uint_as_float(0xff800000u); }
  __device__ __forceinline__ float operator()(float a, float b) const {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
  }
};

// A word of the operation's neutral elements.
template <typename Format, typename Op>
__device__ __forceinline__ constexpr uint32_t none_of() {
  return Op::kMax ? Format::kLowest : 0;
}

// A thread's partial results, one per place in a vector of kBytes.
template <typename Format, typename Op, int kBytes = 16>
struct Accumulator {
  static constexpr int kCount = kBytes / Format::kBytes;

  float values[kCount];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = Op::none();
  }

  template <int kWords>
  __device__ __forceinline__ void add(const uint32_t (&words)[kWords]) {
    static_assert(kWords * 4 == kBytes, "whole vectors");
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      constexpr int kPerWord = 4 / Format::kBytes;
      float unpacked[kPerWord];
      Format::unpack(words[w], unpacked);
#pragma unroll
      for (int i = 0; i < kPerWord; ++i) {
        values[w * kPerWord + i] = Op()(values[w * kPerWord + i], unpacked[i]);
      }
    }
  }

  // Adds two vectors to each other first: half as many sequential roundings, no extra registers.
  template <int kWords>
  __device__ __forceinline__ void add(const uint32_t (&first)[kWords],
                                      const uint32_t (&second)[kWords]) {
    static_assert(kWords * 4 == kBytes, "whole vectors");
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      constexpr int kPerWord = 4 / Format::kBytes;
      float some[kPerWord], more[kPerWord];
      Format::unpack(first[w], some);
      Format::unpack(second[w], more);
#pragma unroll
      for (int i = 0; i < kPerWord; ++i) {
        values[w * kPerWord + i] = Op()(values[w * kPerWord + i], Op()(some[i], more[i]));
      }
    }
  }

  // Combines all places, as a tree.
  __device__ __forceinline__ float total() const {
    float sums[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = values[i];
#pragma unroll
    for (int half = kCount / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) sums[i] = Op()(sums[i], sums[i + half]);
    }
    return sums[0];
  }
};

// Loads kWords words that are read only once.
template <int kWords>
__device__ __forceinline__ void load_once(uint32_t (&words)[kWords], const char* address) {
  if constexpr (kWords == 4) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(address));
  } else {
    load_vector(words, address);
  }
}

// Avoids a division, which takes more instructions than a short row's sum.
__device__ __forceinline__ float mean_of(float sum, const ReduceArgs& args) {
  return args.divisor == 1.0f ? sum : sum / args.divisor;
}

__device__ __forceinline__ void store_result(void* out, DType dtype, int64_t index, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(out)[index] = value;
    return;
  }
  uint16_t bits;
  if (dtype == DType::kBFloat16) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  } else {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  }
  static_cast<uint16_t*>(out)[index] = bits;
}

}  // namespace tiercel

#endif  // KERNELS_REDUCE_ACCUMULATE_CUH_
