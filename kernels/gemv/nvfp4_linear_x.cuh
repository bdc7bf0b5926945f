// SPDX-License-Identifier: Apache-2.0
// nvfp4_linear's x in shared memory, in the order in which threads read it.
#ifndef KERNELS_GEMV_NVFP4_LINEAR_X_CUH_
#define KERNELS_GEMV_NVFP4_LINEAR_X_CUH_

#include <cstdint>

#include "kernels/gemv/nvfp4_linear_kernels.h"

namespace tiercel {

// The power of two that brings a magnitude, as bfloat16 bits, to [2^14, 2^15), and its inverse.
__device__ __forceinline__ float2 range_of(uint32_t largest) {
  const int exponent = min(max(static_cast<int>(largest >> 7) - 127, -112), 127);
  const int shift = 14 - exponent;
  return {__uint_as_float((127 + shift) << 23), __uint_as_float((127 - shift) << 23)};
}

__device__ __forceinline__ uint32_t scaled_pair(uint32_t low, uint32_t high, float factor) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;"
      : "=r"(pair)
      : "f"(__uint_as_float(high) * factor), "f"(__uint_as_float(low) * factor));
  return pair;
}

// The largest magnitude among a lane's eight values, as bfloat16 bits.
__device__ __forceinline__ uint32_t largest_of(const uint4& words) {
  uint32_t halves = 0;
  for (uint32_t word : {words.x, words.y, words.z, words.w}) {
    asm("max.u16x2 %0, %0, %1;" : "+r"(halves) : "r"(word & 0x7fff7fffu));
  }
  return max(halves & 0xffffu, halves >> 16);
}

// Stores the block's part of x by line of K, tile of tokens and read of a warp: 512 bytes, eight
// values per thread in the order of decode_wide().
template <int kTiles, bool kSingle>
__device__ __forceinline__ void load_x(const Nvfp4LinearArgs& args, char* to, int first_k,
                                       int lines, int warp) {
  const int lane = threadIdx.x % 32, warps = args.tiles * args.parts;
  const int i = lane % 8;
  // A line has room for a power of two of tokens.
  const int shift = kSingle ? 0 : 32 - __clz(args.tokens - 1);
  const int all = lines << shift;
  constexpr int kAtOnce = kSingle ? 1 : kTiles * 4;
  if (kSingle && warp == 0 && lane < kLinearZeroBytes / 16) {
    reinterpret_cast<uint4*>(to + lines * 512)[lane] = make_uint4(0, 0, 0, 0);
  }
  for (int base = warp; base < all; base += warps * kAtOnce) {
    uint4 values[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int item = base + j * warps;
      const int token = item & ((1 << shift) - 1);
      const int k = first_k + (item >> shift) * kLinearLine + lane * 8;
      values[j] = make_uint4(0, 0, 0, 0);
      if (item < all && token < args.tokens && k < args.k) {
        const char* from = args.x + token * args.x_row + k * int64_t{2};
        values[j] = *reinterpret_cast<const uint4*>(from);
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int item = base + j * warps;
      if (item >= all) break;
      const int token = item & ((1 << shift) - 1), line = item >> shift;
      const uint4 v = values[j];
      if constexpr (kSingle) {
        const float2 factor = range_of(__reduce_max_sync(0xffffffffu, largest_of(v)));
        reinterpret_cast<uint4*>(to + line * 512)[lane] =
            make_uint4(scaled_pair(v.x << 16, v.z << 16, factor.x),
                       scaled_pair(v.y << 16, v.w << 16, factor.x),
                       scaled_pair(v.x & 0xffff0000u, v.z & 0xffff0000u, factor.x),
                       scaled_pair(v.y & 0xffff0000u, v.w & 0xffff0000u, factor.x));
        if (lane == 0) {
          *reinterpret_cast<float*>(to + lines * 512 + kLinearZeroBytes + line * 16) = factor.y;
        }
        continue;
      }
      const int place = token % 8 * 4 + lane / 8;
      *reinterpret_cast<uint4*>(to + (line * kTiles + token / 8) * kLinearTileBytes +
                                i * kLinearPieceBytes + place * 16) =
          make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.y, v.w, 0x5410),
                     __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x7632));
    }
  }
}

}  // namespace tiercel

#endif  // KERNELS_GEMV_NVFP4_LINEAR_X_CUH_
