// SPDX-License-Identifier: Apache-2.0
// Scores as unsigned keys: a larger key is a larger score or, among equal scores, a lower index.
// All keys of a row differ, so sorting needs no tie handling. -0 becomes +0, NaN the largest score.
// Likewise for the keys of whole vectors, which order them by their largest scores.
#ifndef KERNELS_ROUTING_SCORE_KEYS_CUH_
#define KERNELS_ROUTING_SCORE_KEYS_CUH_

#include <cstdint>

#include "kernels/sm90/vector.cuh"

namespace tiercel {

struct BFloat16Format {
  static constexpr uint32_t kMinusInfinity = 0xff80u;
  // Adding +0 converts -0 to +0 and any NaN to the positive one, which orders above infinity.
  static __device__ __forceinline__ uint32_t add_zero(uint32_t pair) {
    uint32_t sum;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(pair), "r"(0));
    return sum;
  }
  static __device__ __forceinline__ uint32_t max(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
  }
  static __device__ __forceinline__ float to_float(uint32_t bits) {
    return bfloat16_bits_to_float(bits);
  }
};

struct Float16Format {
  static constexpr uint32_t kMinusInfinity = 0xfc00u;
  static __device__ __forceinline__ uint32_t add_zero(uint32_t pair) {
    uint32_t sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(pair), "r"(0));
    return sum;
  }
  static __device__ __forceinline__ uint32_t max(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
  }
  static __device__ __forceinline__ float to_float(uint32_t bits) {
    return float16_bits_to_float(bits);
  }
};

// 16-bit scores: the ordered score in the high half of a 32-bit key, the index's complement in the
// low half.
template <typename Format>
struct KeysOf16Bit {
  using Key = uint32_t;
  static constexpr bool kExact = true;
  static constexpr int kBytes = 2;
  static constexpr int kPerWord = 2;
  static constexpr uint32_t kPad = Format::kMinusInfinity * 0x10001u;

  // The keys of a word's scores, with indices from `index` on.
  static __device__ __forceinline__ void make(Key* keys, uint32_t word, int index) {
    const uint32_t ordered = order(word);
    keys[0] = (ordered << 16) | (0xffffu - index);
    keys[1] = (ordered & 0xffff0000u) | (0xffffu - (index + 1));
  }
  // The key of a vector's largest score, with the vector's number as the index.
  template <int kWords>
  static __device__ __forceinline__ Key of_vector(const uint32_t (&words)[kWords], int vector) {
    uint32_t largest = words[0];
#pragma unroll
    for (int w = 1; w < kWords; ++w) largest = Format::max(largest, words[w]);
    largest = Format::max(largest, __byte_perm(largest, 0, 0x1032));
    return (order(largest) << 16) | (0xffffu - vector);
  }
  static __device__ __forceinline__ Key add_index(Key key, int offset) { return key - offset; }
  static __device__ __forceinline__ int index(Key key) { return 0xffff - (key & 0xffffu); }
  static __device__ __forceinline__ float score(Key key) {
    const uint32_t ordered = key >> 16;
    return Format::to_float(ordered ^ (key & 0x80000000u ? 0x8000u : 0xffffu));
  }
  static __device__ __forceinline__ float raw_score(uint32_t word, int half) {
    return Format::to_float(half ? word >> 16 : word & 0xffffu);
  }

 private:
  // Both halves as unsigned integers in the scores' order.
  static __device__ __forceinline__ uint32_t order(uint32_t word) {
    const uint32_t scores = Format::add_zero(word);
    uint32_t signs;  // 0xffff for each negative half
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(scores));
    return scores ^ (signs | 0x80008000u);
  }
};

__device__ __forceinline__ uint32_t order_float(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return bits ^ (static_cast<uint32_t>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

// float32 scores: 64-bit keys.
struct KeysOfFloat32 {
  using Key = uint64_t;
  static constexpr bool kExact = true;
  static constexpr int kBytes = 4;
  static constexpr int kPerWord = 1;
  static constexpr uint32_t kPad = 0xff800000u;

  static __device__ __forceinline__ void make(Key* keys, uint32_t word, int index) {
    keys[0] = join(order_float(__uint_as_float(word)), 0xffffffffu - index);
  }
  static __device__ __forceinline__ Key add_index(Key key, int offset) {
    return join(static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(key) - offset);
  }
  static __device__ __forceinline__ int index(Key key) {
    return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key));
  }
  static __device__ __forceinline__ float score(Key key) {
    const uint32_t ordered = static_cast<uint32_t>(key >> 32);
    return __uint_as_float(ordered ^ (ordered & 0x80000000u ? 0x80000000u : 0xffffffffu));
  }
  static __device__ __forceinline__ float raw_score(uint32_t word, int) {
    return __uint_as_float(word);
  }

 private:
  static __device__ __forceinline__ Key join(uint32_t high, uint32_t low) {
    return static_cast<uint64_t>(high) << 32 | low;
  }
};

// float32 scores: 32-bit keys, in which the index replaces the score's kIndexBits lowest bits.
// Scores that differ only there may come out in the wrong order, so callers check the result (see
// settle_exactly in topk_softmax.cu).
template <int kIndexBits>
struct RoundedKeysOfFloat32 {
  using Key = uint32_t;
  static constexpr bool kExact = false;
  static constexpr int kBytes = 4;
  static constexpr int kPerWord = 1;
  static constexpr uint32_t kPad = 0xff800000u;
  static constexpr uint32_t kIndexMask = (1u << kIndexBits) - 1;

  static __device__ __forceinline__ void make(Key* keys, uint32_t word, int index) {
    keys[0] = (order_float(__uint_as_float(word)) & ~kIndexMask) | (kIndexMask - index);
  }
  template <int kWords>
  static __device__ __forceinline__ Key of_vector(const uint32_t (&words)[kWords], int vector) {
    float largest = __uint_as_float(words[0]);
#pragma unroll
    for (int w = 1; w < kWords; ++w) {
      asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(__uint_as_float(words[w])));
    }
    return (order_float(largest) & ~kIndexMask) | (kIndexMask - vector);
  }
  static __device__ __forceinline__ Key add_index(Key key, int offset) { return key - offset; }
  static __device__ __forceinline__ int index(Key key) { return kIndexMask - (key & kIndexMask); }
  static __device__ __forceinline__ float raw_score(uint32_t word, int) {
    return __uint_as_float(word);
  }
};

}  // namespace tiercel

#endif  // KERNELS_ROUTING_SCORE_KEYS_CUH_
