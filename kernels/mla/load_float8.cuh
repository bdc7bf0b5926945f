// SPDX-License-Identifier: Apache-2.0
// Float8 keys, converted to 16 bits on the way to shared memory: wgmma only transposes 16 bits.
#ifndef KERNELS_MLA_LOAD_FLOAT8_CUH_
#define KERNELS_MLA_LOAD_FLOAT8_CUH_

#include <cstdint>

#include "kernels/mla/block.cuh"
#include "kernels/mla/load.cuh"
#include "kernels/mla/share.cuh"
#include "kernels/sm90/float_format.cuh"

namespace tiercel {

// 16 float8 of a row become 32 bytes of its tile.
template <typename Format, bool kScaled>
__device__ __forceinline__ void widen(const uint32_t (&from)[4], float scale,
                                      uint32_t (&to)[2][4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t pair = from[i / 2] >> (i % 2 * 16) & 0xffffu;
    const float2 wide = e4m3x2_to_float2(pair);
    const float values[2] = {kScaled ? wide.x * scale : wide.x, kScaled ? wide.y * scale : wide.y};
    to[i / 4][i % 4] = Format::pack(values);
  }
}

__device__ __forceinline__ void store_chunk(uint32_t tile, int row, int chunk,
                                            const uint32_t (&words)[4]) {
  const uint32_t to =
      tile + chunk / 8 * kMlaBlock + row * kMlaColumns + ((chunk % 8 ^ row % 8) * 16);
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// `chunk` is the first of two. Neighbours of different blocks begin with another one, so that no
// two of eight lanes write to the same bank.
__device__ __forceinline__ void store_chunks(uint32_t tile, int row, int chunk,
                                             const uint32_t (&words)[2][4]) {
  const int odd = chunk / 8 % 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t own[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) own[w] = i == odd ? words[0][w] : words[1][w];
    store_chunk(tile, row, chunk + (i ^ odd), own);
  }
}

// The third warpgroup loads, in halves as the other two multiply them.
template <typename Format, bool kPacked, typename Finder, typename Steps>
__device__ __forceinline__ void load_float8_keys(const MlaDecodeArgs& args, Steps share,
                                                 const Memory& memory, unsigned char* pointer) {
  constexpr int kRowLanes = 16;             // of a half row of latents, 16 float8 each
  constexpr int kRows = 128 / kRowLanes;    // at once
  constexpr int kLoads = kMlaStep / kRows;  // of a thread
  // The rotary columns: as the others, or 16-bit already.
  constexpr int kRotaryLanes = kPacked ? kMlaRotary * 2 / 16 : kMlaRotary / 16;
  constexpr int kRotaryRows = 128 / kRotaryLanes;
  constexpr int kRotaryLoads = kMlaStep / kRotaryRows;
  constexpr int kRotaryAt = kPacked ? kMlaPacked - kMlaRotary * 2 : kMlaLatent;
  int64_t* const rows = reinterpret_cast<int64_t*>(pointer + kMlaKeyRows);
  Finder finder;
  Ring ring;
  do {
    for (int step = share.first; step < share.last; ++step, ++ring.count) {
      const int stage = ring.stage();
      const auto found = finder.find(args, share, step, rows + stage * kMlaStep);
      const uint32_t tile = memory.keys(stage);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const int thread = opaque(threadIdx.x % 128);
        const int lane = thread % kRowLanes, column = half * 256 + lane * 16;
        uint32_t words[kLoads][4];
        float scales[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int row = thread / kRowLanes + i * kRows;
          words[i][0] = words[i][1] = words[i][2] = words[i][3] = 0;
          scales[i] = 0.0f;
          if (!found.real(row)) continue;  // zeros
          const char* from = args.cache + found.own[row];
          load_vector(words[i], from + column);
          if (kPacked) {
            scales[i] = *reinterpret_cast<const float*>(from + kMlaLatent + column / kMlaGroup * 4);
          }
        }
        mbarrier_wait(memory.empty(half, stage), ring.parity() ^ 1);
        if (half == 0) found.note(memory, pointer, stage);
        const auto store = [&](int i) {
          uint32_t wide[2][4];
          widen<Format, kPacked>(words[i], scales[i], wide);
          store_chunks(tile, thread / kRowLanes + i * kRows, column / 8, wide);
        };
#pragma unroll
        for (int i = 0; i < kLoads / 2; ++i) store(i);
        // Registers are free now for the rotary columns.
        uint32_t turned[kRotaryLoads][4];
#pragma unroll
        for (int i = 0; i < kRotaryLoads; ++i) {
          const int row = thread / kRotaryLanes + i * kRotaryRows;
          turned[i][0] = turned[i][1] = turned[i][2] = turned[i][3] = 0;
          if (half == 1 || !found.real(row)) continue;
          load_vector(turned[i],
                      args.cache + found.own[row] + kRotaryAt + thread % kRotaryLanes * 16);
        }
#pragma unroll
        for (int i = kLoads / 2; i < kLoads; ++i) store(i);
        if (half == 0) {
#pragma unroll
          for (int i = 0; i < kRotaryLoads; ++i) {
            const int row = thread / kRotaryLanes + i * kRotaryRows;
            const int at = kMlaLatent / 8 + thread % kRotaryLanes * (kPacked ? 1 : 2);
            if constexpr (kPacked) {
              store_chunk(tile, row, at, turned[i]);
            } else {
              uint32_t wide[2][4];
              widen<Format, false>(turned[i], 1.0f, wide);
              store_chunks(tile, row, at, wide);
            }
          }
        }
        proxy_fence();
        release(memory.full(half, stage));
      }
    }
  } while (share.next(args));
}

}  // namespace tiercel

#endif  // KERNELS_MLA_LOAD_FLOAT8_CUH_
