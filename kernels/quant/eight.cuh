// SPDX-License-Identifier: Apache-2.0
// Eight consecutive values of a row in their memory format: one or two 16-byte loads.
#ifndef KERNELS_QUANT_EIGHT_CUH_
#define KERNELS_QUANT_EIGHT_CUH_

#include <cstdint>

#include "kernels/sm90/narrow_floats.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {

struct BFloat16Source {
  static constexpr int kBytes = 2;
  static __device__ __forceinline__ float low(uint32_t word) {
    return bfloat16_bits_to_float(word);
  }
  static __device__ __forceinline__ float high(uint32_t word) {
    return __uint_as_float(word & 0xffff0000u);
  }
};

struct Float16Source {
  static constexpr int kBytes = 2;
  static __device__ __forceinline__ float low(uint32_t word) {
    return float16_bits_to_float(word & 0xffffu);
  }
  static __device__ __forceinline__ float high(uint32_t word) {
    return float16_bits_to_float(word >> 16);
  }
};

struct Float32Source {
  static constexpr int kBytes = 4;
};

// The scale to float8_e4m3fn for the largest magnitude, given as a float's bits.
__device__ __forceinline__ float e4m3_scale(uint32_t largest) {
  const float scale = __fdiv_rn(__uint_as_float(largest), kE4M3Max);
  return scale < 0x1p-126f ? 0x1p-126f : scale;  // keeps NaN
}

__device__ __forceinline__ uint32_t max_of_halves(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

template <typename Source>
struct Eight {
  static constexpr int kWords = 2 * Source::kBytes;

  uint32_t words[kWords];

  __device__ __forceinline__ void fill(uint32_t word) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = word;
  }
  __device__ __forceinline__ void clear() { fill(0); }
  __device__ __forceinline__ void load(const void* address) {
#pragma unroll
    for (int w = 0; w < kWords; w += 4) {
      const uint4 v = reinterpret_cast<const uint4*>(address)[w / 4];
      words[w] = v.x, words[w + 1] = v.y, words[w + 2] = v.z, words[w + 3] = v.w;
    }
  }
  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (Source::kBytes == 4) {
      return __uint_as_float(words[i]);
    } else {
      return i % 2 ? Source::high(words[i / 2]) : Source::low(words[i / 2]);
    }
  }
  // The largest magnitude as a float's bits, which as unsigned integers order like magnitudes, with
  // NaN above infinity.
  __device__ __forceinline__ uint32_t largest() const {
    if constexpr (Source::kBytes == 4) {
      uint32_t bits = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) bits = max(bits, words[w] & 0x7fffffffu);
      return bits;
    } else {
      uint32_t halves = words[0] & 0x7fff7fffu;
#pragma unroll
      for (int w = 1; w < kWords; ++w) halves = max_of_halves(halves, words[w] & 0x7fff7fffu);
      halves = max_of_halves(halves, halves >> 16);
      return __float_as_uint(Source::low(halves & 0xffffu));
    }
  }
};

// To e4m3.
template <typename Source>
__device__ __forceinline__ uint2 scaled(const Eight<Source>& x, float inverse) {
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = x[i] * inverse;
  return make_uint2(float4_to_e4m3x4(values), float4_to_e4m3x4(values + 4));
}

template <typename Source>
__device__ __forceinline__ void store_scaled(char* q, const Eight<Source>& x, float inverse) {
  *reinterpret_cast<uint2*>(q) = scaled(x, inverse);
}

// The maximum over the block, a multiple of 32 threads; `scratch` holds one word per warp.
__device__ __forceinline__ uint32_t block_max(uint32_t value, uint32_t* scratch) {
  value = warp_max(value);
  const int warps = blockDim.x / 32;
  if (warps == 1) return value;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return warp_max(lane < warps ? scratch[lane] : 0);
}

}  // namespace tiercel

#endif  // KERNELS_QUANT_EIGHT_CUH_
