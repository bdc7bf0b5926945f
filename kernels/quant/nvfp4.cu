// SPDX-License-Identifier: Apache-2.0
// nvfp4_quantize: 16 neighbouring values become 16 e2m1 and one e4m3 scale. nvfp4_dequantize: the
// inverse.
//
// Each thread processes a whole group of 16: it reads 32 bytes of 16-bit values and writes 8 bytes
// of codes and 1 of scale, so threads exchange nothing. At [8192, 8192] in bfloat16 these are 128
// MiB and 36 MiB, 40 us at 4.3 TB/s. At that rate an SM has about 17 instructions per value:
// rounding to e2m1 takes six float additions (narrow_floats.cuh); multiplications assemble a word
// of eight codes, and byte operations its signs. The arithmetic is the reference's, bit for bit:
// scale = e4m3(min(amax / 6 / global, 448)) and q = e2m1(x * (1 / (scale
// * global))), every operation rounded to nearest even.
#include <cstdint>

#include "kernels/quant/eight.cuh"
#include "kernels/quant/nvfp4_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/narrow_floats.cuh"
#include "kernels/sm90/prefetch.h"

namespace tiercel {
namespace {

__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

// The sign bits of eight values, each in its code's highest bit.
template <typename Source>
__device__ __forceinline__ uint32_t signs_of(const Eight<Source>& x) {
  if constexpr (Source::kBytes == 2) {
    // The upper bytes of the even and of the odd values.
    const uint32_t even = permute(permute(x.words[0], x.words[1], 0x0051),
                                  permute(x.words[2], x.words[3], 0x0051), 0x5410);
    const uint32_t odd = permute(permute(x.words[0], x.words[1], 0x0073),
                                 permute(x.words[2], x.words[3], 0x0073), 0x5410);
    return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
  } else {
    uint32_t signs = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) signs |= x.words[i] >> (28 - 4 * i) & 0x8u << 4 * i;
    return signs;
  }
}

// The codes of eight values, value i at bits [4i, 4i + 4). `inverse_half` is half of 1 / scale; the
// product is rounded as in the reference, not fused with the additions that follow.
template <typename Source>
__device__ __forceinline__ uint32_t codes_of(const Eight<Source>& x, float inverse_half) {
  uint32_t codes = 0;
  uint32_t magic = 0;  // the constant that the additions below add
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    codes = codes * 16 + half_magnitude_to_e2m1(__fmul_rn(fabsf(x[i]), inverse_half));
    magic = magic * 16 + kE2M1Magic;
  }
  return (codes - magic) | signs_of(x);
}

// 1 / value for an e4m3, rounded to nearest even; omits cases that no e4m3 reaches.
__device__ __forceinline__ float reciprocal(float value) {
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(value));
  return fmaf(near, fmaf(-value, near, 1.0f), near);
}

template <typename Source>
__global__ void __launch_bounds__(kNvfp4QuantizeThreads)
    nvfp4_quantize(const __grid_constant__ Nvfp4Args args) {
  // For 16-bit values, amax * (1 / 6) gives the same e4m3 as amax / 6 (tested exhaustively).
  constexpr bool kShort = Source::kBytes == 2;
  constexpr float kSixth = 1.0f / 6.0f;
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kNvfp4QuantizeThreads + threadIdx.x;
  const char* from = args.values;
  if (args.flat) {
    from += group * 16 * Source::kBytes;
  } else {
    const int64_t row = group / args.row_groups;
    from += row * args.row_bytes + (group - row * args.row_groups) * 16 * Source::kBytes;
  }
  if (is_prefetching(args.prefetch_blocks) && group < args.groups) prefetch_l2(from);
  grid_dependency_wait();
  grid_dependency_launch();
  if (group >= args.groups) return;
  Eight<Source> first, second;
  first.load(from);
  second.load(from + 8 * Source::kBytes);
  const bool scaled = args.global_scale != nullptr;
  const float global = scaled ? *args.global_scale : 1.0f;
  const float largest = __uint_as_float(max(first.largest(), second.largest()));
  float wanted = kShort && !scaled ? largest * kSixth : __fdiv_rn(largest, kE2M1Max);
  if (scaled) wanted = __fdiv_rn(wanted, global);
  const uint32_t scale = float2_to_e4m3x2(wanted, 0.0f);
  const float total = e4m3_to_float(scale) * global;
  const float inverse = total == 0.0f ? 0.0f : scaled ? __frcp_rn(total) : reciprocal(total);
  // Halving is exact unless it underflows the normal floats, where every product is 0.
  const uint32_t low = codes_of(first, inverse * 0.5f);
  const uint32_t high = codes_of(second, inverse * 0.5f);
  reinterpret_cast<uint2*>(args.q)[group] = make_uint2(low, high);
  args.scale[group] = static_cast<char>(scale);
}

// Converts float32 pairs to 16-bit pairs.
struct BFloat16Target {
  static constexpr int kBytes = 2;
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
  }
};
struct Float16Target {
  static constexpr int kBytes = 2;
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    uint32_t both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
  }
};
struct Float32Target {
  static constexpr int kBytes = 4;
};

template <typename Target>
__device__ __forceinline__ void store_eight(char* address, const float (&values)[8]) {
  uint32_t words[2 * Target::kBytes];
  if constexpr (Target::kBytes == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = Target::pair(values[2 * i], values[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = __float_as_uint(values[i]);
  }
#pragma unroll
  for (int w = 0; w < 2 * Target::kBytes; w += 4) {
    reinterpret_cast<uint4*>(address)[w / 4] =
        make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
  }
}

template <int i>
__device__ __forceinline__ void decode_pair(float (&values)[8], uint32_t word, float scale) {
  const uint32_t halves = e2m1_pair_to_half2<i>(word);
  values[i] = float16_bits_to_float(halves & 0xffffu) * 16384.0f * scale;
  values[i + 4] = float16_bits_to_float(halves >> 16) * 16384.0f * scale;
}

template <typename Target>
__global__ void __launch_bounds__(kNvfp4DequantizeThreads)
    nvfp4_dequantize(const __grid_constant__ Nvfp4Args args) {
  // Half a group per thread, so that a warp's stores are adjacent.
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * kNvfp4DequantizeThreads * kNvfp4Halves + threadIdx.x;
  if (is_prefetching(args.prefetch_blocks)) {
#pragma unroll
    for (int g = 0; g < kNvfp4Halves; ++g) {
      const int64_t half = first + g * kNvfp4DequantizeThreads;
      if (half / 2 >= args.groups) continue;
      // Prefetched by the threads at the beginning of 32 bytes.
      if (threadIdx.x % 8 == 0) prefetch_l2(args.q + half * 4);
      if (threadIdx.x % 32 == 0) prefetch_l2(args.scale + half / 2);
    }
  }
  grid_dependency_wait();
  grid_dependency_launch();
  uint32_t codes[kNvfp4Halves];
  uint32_t scales[kNvfp4Halves];
#pragma unroll
  for (int g = 0; g < kNvfp4Halves; ++g) {
    const int64_t half = first + g * kNvfp4DequantizeThreads;
    codes[g] = scales[g] = 0;
    if (half / 2 >= args.groups) continue;
    codes[g] = reinterpret_cast<const uint32_t*>(args.q)[half];
    scales[g] = static_cast<uint8_t>(args.scale[half / 2]);
  }
  const float global = args.global_scale != nullptr ? *args.global_scale : 1.0f;
#pragma unroll
  for (int g = 0; g < kNvfp4Halves; ++g) {
    const int64_t half = first + g * kNvfp4DequantizeThreads;
    if (half / 2 >= args.groups) continue;
    const float scale = e4m3_to_float(scales[g]) * global;
    float values[8];
    decode_pair<0>(values, codes[g], scale);
    decode_pair<1>(values, codes[g], scale);
    decode_pair<2>(values, codes[g], scale);
    decode_pair<3>(values, codes[g], scale);
    const int64_t row = args.flat ? 0 : half / (2 * args.row_groups);
    store_eight<Target>(args.values + row * args.row_bytes +
                            (half - row * 2 * args.row_groups) * 8 * Target::kBytes,
                        values);
  }
}

struct Entry {
  DType dtype;
  Kernel quantize;
  Kernel dequantize;
};

#define TIERCEL_KERNELS(dtype)                                           \
  {DType::k##dtype,                                                      \
   Kernel("nvfp4_quantize<" #dtype ">",                                  \
          reinterpret_cast<const void*>(nvfp4_quantize<dtype##Source>)), \
   Kernel("nvfp4_dequantize<" #dtype ">",                                \
          reinterpret_cast<const void*>(nvfp4_dequantize<dtype##Target>))}

const Entry kKernels[] = {TIERCEL_KERNELS(BFloat16), TIERCEL_KERNELS(Float16),
                          TIERCEL_KERNELS(Float32)};

const Entry* find(DType dtype) {
  for (const Entry& entry : kKernels) {
    if (entry.dtype == dtype) return &entry;
  }
  return nullptr;
}

}  // namespace

const Kernel* nvfp4_quantize_kernel(DType dtype) {
  const Entry* entry = find(dtype);
  return entry == nullptr ? nullptr : &entry->quantize;
}

const Kernel* nvfp4_dequantize_kernel(DType dtype) {
  const Entry* entry = find(dtype);
  return entry == nullptr ? nullptr : &entry->dequantize;
}

}  // namespace tiercel
