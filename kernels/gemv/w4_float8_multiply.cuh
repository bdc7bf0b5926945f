// SPDX-License-Identifier: Apache-2.0
// Products of e4m3 activations with 4-bit weights decoded in registers, for a thread block's ring
// of stages: w4_float8.cu has the plan.
#ifndef KERNELS_GEMV_W4_FLOAT8_MULTIPLY_CUH_
#define KERNELS_GEMV_W4_FLOAT8_MULTIPLY_CUH_

#include <cstdint>

#include "kernels/gemv/w4_float8_weights.cuh"
#include "kernels/gemv/w4_format.h"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace tiercel {

inline constexpr int kFloat8Step = 128;  // values of K, a stage
inline constexpr int kFloat8Chunk = 32;  // values of K, a product

// A value that the compiler holds in a register instead of computing it again for each use, where
// there are registers.
template <bool kHold>
__device__ __forceinline__ uint32_t kept(uint32_t value) {
  if constexpr (kHold) asm volatile("" : "+r"(value));
  return value;
}

// The largest exponents of two rows, which begin so many bytes behind `scales`, among groups
// `first` to `last`, found by the 4 lanes that share the rows.
__device__ __forceinline__ void largest_exponents(uint32_t (&largest)[2], const char* scales,
                                                  const uint32_t (&rows)[2], int first, int last) {
  largest[0] = largest[1] = 0;
#pragma unroll 8
  for (int group = first + threadIdx.x % 4 * 2; group < last; group += 8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t two = *reinterpret_cast<const uint16_t*>(scales + group + rows[i]);
      largest[i] = max(largest[i], max(two & 0xff, two >> 8));
    }
  }
#pragma unroll
  for (uint32_t& one : largest) {
    one = max(one, __shfl_xor_sync(0xffffffffu, one, 1));
    one = max(one, __shfl_xor_sync(0xffffffffu, one, 2));
  }
}

// A row's scales of a step as read from memory, not used before they have to be. e2m1's: two
// exponents a word. Whole numbers': 16-bit floats, and zero points, if any.
template <bool kFloats, int kGroup>
struct Float8RowScales {
  static constexpr int kParts = kFloats ? 2 : kFloat8Step / kGroup;
  uint32_t scale[kParts];
  uint32_t zero[kFloats ? 1 : kParts];

  // Those of the rows that begin `row` and `zero_row` bytes behind the pointers, from value k of K
  // on. What lies behind the last value of K is replaced by a scale before it; its products are
  // with zeros.
  __device__ __forceinline__ void read(const W4Scales& all, uint32_t row, uint32_t zero_row, int k,
                                       int last_k) {
    // All rows share the pointer before it, so each row's address takes one addition.
    const auto load = [](const char* from, uint32_t behind) {
      return uint32_t{*reinterpret_cast<const uint16_t*>(from + behind)};
    };
    if constexpr (kFloats) {
      scale[0] = load(all.scale + k / 32, row);
      scale[1] = load(all.scale + min(k + 64, last_k - 64) / 32, row);
    } else {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const int at = (min(k + i * kGroup, last_k - kGroup) >> all.group_shift) * 2;
        scale[i] = load(all.scale + at, row);
        if (all.zero != nullptr) zero[i] = load(all.zero + at, zero_row);
      }
    }
  }
};

// The two rows of the weight that a thread decodes: where their scales and zero points begin, in
// bytes behind the pointers of W4Scales, and e2m1's largest exponents.
struct Float8Rows {
  uint32_t scale[2], zero[2], largest[2];
};

// Multiplies the steps from `first` to `last` of a ring of kStages stages, each with rows of
// kFloat8Step bytes of x and then rows of half as many of the weight; sums[i] are those of row
// my_row, or of the 8th behind it if i / 2 is odd. begin() is called before anything is waited for,
// arrived() behind each wait for a stage. Warps arrive at `freed`. `tables`: those of
// w4_float8_weights.cuh.
template <bool kFloats, int kGroup, int kStages, int kStageBytes, bool kHold, int kSums,
          typename Begin, typename Arrived>
__device__ __forceinline__ void multiply_float8(float (&sums)[kSums], const W4Scales& all,
                                                bool float16_scales, int k, const Float8Rows& rows,
                                                int first, int last, int my_row, const char* shared,
                                                const uint8_t* tables, uint64_t* filled,
                                                uint64_t* freed, const Begin& begin,
                                                const Arrived& arrived) {
  using Scales = Float8RowScales<kFloats, kGroup>;
  constexpr int kTokens = 2 * kSums;
  constexpr int kXBytes = kTokens * kFloat8Step;
  constexpr int kRowBytes = kFloat8Step / 2;  // of a row of the weight in a stage
  constexpr int kChunk = kFloat8Chunk, kChunks = kFloat8Step / kChunk;
  constexpr int kPerGroup = kGroup / kChunk;         // products between two scalings
  constexpr int kInFlight = kPerGroup == 1 ? 1 : 2;  // with the one before
  const int lane = threadIdx.x % 32;
  float group_sums[kFloats ? 1 : kTokens / 2];
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  const uint32_t base = shared_address(shared);
  const uint32_t small_tables = shared_address(tables);
  // Offset of this thread's first word of each chunk; chunks of 16 bytes are swizzled by rows.
  uint32_t places[kChunks];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    places[chunk] = kept<kHold>(my_row * kRowBytes + (chunk ^ lane / 8) * 16 + lane % 4 / 2 * 4);
  }
  const uint32_t picks = kept<kHold>(lane % 2 == 0 ? 0x5410 : 0x7632);
  Scales bits[2];  // of the next step
  // Scales of the step that is decoded. e2m1: four distances from the row's largest exponent. Whole
  // numbers': in each word a scale and above it a zero point.
  uint32_t step_bits[2][kFloats ? 1 : Scales::kParts];
  const auto load_bits = [&](int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bits[half].read(all, rows.scale[half], rows.zero[half], step * kFloat8Step, k);
    }
  };
  const auto take_bits = [&] {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Scales& row = bits[half];
      if constexpr (kFloats) {
        // No byte borrows from another.
        step_bits[half][0] = rows.largest[half] * 0x01010101u - (row.scale[0] | row.scale[1] << 16);
      } else {
#pragma unroll
        for (int i = 0; i < Scales::kParts; ++i) {
          step_bits[half][i] =
              all.zero == nullptr ? row.scale[i] : row.scale[i] | row.zero[i] << 16;
        }
      }
    }
  };
  uint4 numbers[2];  // tables of the rows' zero points
  uint32_t words[2][2];
  const auto load_words = [&](int stage, int chunk) {
    const char* const weights = shared + stage * kStageBytes + kXBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const char* const at = weights + places[chunk] + half * 8 * kRowBytes;
      words[half][0] = *reinterpret_cast<const uint32_t*>(at);
      words[half][1] = *reinterpret_cast<const uint32_t*>(at + 8);
    }
  };
  uint32_t a[kChunks][4];  // a step's operands: decoding runs ahead of the products
  // Decodes the words of a step's `chunk`th 32 values of K.
  const auto decode_chunk = [&](int chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // 8 weights, 4 neighbours from each word.
      const uint32_t word = permute_bytes(words[half][0], words[half][1], picks);
      uint32_t (&to)[4] = a[chunk];
      if constexpr (kFloats) {
        const uint32_t down = step_bits[half][0] >> chunk * 8 & 0xff;
        look_up(to[half], to[half + 2], word, magnitudes(down, small_tables));
      } else {
        if (chunk % kPerGroup == 0) {
          const uint32_t bits_of_zero = step_bits[half][chunk / kPerGroup] >> 16;
          const int zero = all.zero == nullptr ? 8 : zero_point_index(bits_of_zero, float16_scales);
          numbers[half] = reinterpret_cast<const uint4*>(tables)[zero];
        }
        look_up(to[half], to[half + 2], word, numbers[half]);
      }
    }
  };
  // Adds the sums of a finished group.
  const auto add_group = [&](const float (&scales)[2]) {
    if constexpr (!kFloats) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) {
        sums[i] = fmaf(group_sums[i], scales[i / 2 % 2], sums[i]);
      }
    }
  };
  begin();
  int stage = 0;
  uint32_t parity = 0;
  if (first < last) {
    load_bits(first);
    take_bits();
    load_bits(min(first + 1, last - 1));
    mbarrier_wait(filled, 0);
    arrived();
    load_words(0, 0);
    decode_chunk(0);
    load_words(0, 1);
  }
  for (int step = first; step < last; ++step) {
    const uint64_t x = rows_descriptor(base + stage * kStageBytes);
    // The last step decodes its own first values once more, without a branch among products.
    const bool more = step + 1 < last;
    const int next_stage = !more ? stage : stage + 1 == kStages ? 0 : stage + 1;
    const uint32_t next_parity = parity ^ (more && next_stage == 0);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const uint64_t b = x + chunk * (kChunk >> 4);
      wgmma_fence();
      if constexpr (kFloats) {
        wgmma_float8_from_registers(sums, a[chunk], b, true);
      } else {
        wgmma_float8_from_registers(group_sums, a[chunk], b, chunk % kPerGroup != 0);
      }
      wgmma_commit();
      float scales[2];
      if constexpr (!kFloats) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          scales[half] = wide_half(step_bits[half][chunk / kPerGroup] & 0xffff, float16_scales);
        }
      }
      if (chunk == kChunks - 2) {
        mbarrier_wait(filled + next_stage, next_parity);
        arrived();
      }
      if (chunk == kChunks - 1) take_bits();
      wgmma_wait<kInFlight>();
      // Words are loaded one chunk ahead of their use.
      decode_chunk((chunk + 1) % kChunks);
      load_words(chunk + 2 < kChunks ? stage : next_stage, (chunk + 2) % kChunks);
      if constexpr (!kFloats) {
        if (chunk % kPerGroup == kPerGroup - 1) {
          wgmma_wait<0>();
          wgmma_settle(group_sums);
          add_group(scales);
        }
      }
    }
    load_bits(min(step + 2, last - 1));
    if constexpr (kFloats) {
      // The compiler runs products one by one if some are in flight at the loop's end.
      wgmma_wait<0>();
      wgmma_settle(sums);
    }
    __syncwarp();  // all lanes have read the stage; one lane arrives for its warp
    if (lane == 0) mbarrier_arrive(freed + stage);
    stage = next_stage, parity = next_parity;
  }
}

// Applies e2m1's largest exponents to the sums of their rows.
template <int kSums>
__device__ __forceinline__ void scale_by_largest(float (&sums)[kSums],
                                                 const uint32_t (&largest)[2]) {
  float factors[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // 2^-127 is not a normal number, and 255 stands for NaN.
    const uint32_t odd = largest[half] == 0 || largest[half] == 255 ? 1u << 22 : 0u;
    factors[half] = __uint_as_float(largest[half] << 23 | odd) * (1.0f / (1 << kScaledUp));
  }
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] *= factors[i / 2 % 2];
}

}  // namespace tiercel

#endif  // KERNELS_GEMV_W4_FLOAT8_MULTIPLY_CUH_
