// SPDX-License-Identifier: Apache-2.0
// The rows of x in fused_moe for few tokens, quantised while they are loaded.
#ifndef KERNELS_MOE_FEW_TOKENS_ROWS_CUH_
#define KERNELS_MOE_FEW_TOKENS_ROWS_CUH_

#include <cstdint>

#include "kernels/moe/few_tokens_grid.cuh"
#include "kernels/quant/eight.cuh"
#include "kernels/sm90/narrow_floats.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

enum class FewScales { kRows, kBlocks };

__device__ __forceinline__ void store_e4m3(char* to, const Eight<BFloat16Source>& eight,
                                           float inverse) {
  float values[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) values[e] = eight[e] * inverse;
  *reinterpret_cast<uint2*>(to) =
      make_uint2(float4_to_e4m3x4(values), float4_to_e4m3x4(values + 4));
}

// All multiplying warps quantise rows of x into shared memory, as fp8_quantize does. Each thread
// takes eight values at a time, from any row.
struct FewX {
  static constexpr int kHold = 2, kThreads = kFewWarps * 32;
  const char* from;
  int64_t from_row;
  int rows, vectors, all, step_rows, step_places, row, place;
  Eight<BFloat16Source> hold[kHold];

  // Calls what(i, r, p) for each of the kHold vectors from row r, place p on, which move on.
  template <typename What>
  __device__ __forceinline__ void each(int& r, int& p, What&& what) {
#pragma unroll
    for (int i = 0; i < kHold; ++i) {
      what(i, r, p);
      r += step_rows, p += step_places;
      if (p >= vectors) p -= vectors, ++r;
    }
  }
  __device__ __forceinline__ void load(int r, int p) {
    each(r, p, [&](int i, int at_row, int at_place) {
      hold[i].clear();
      if (at_row < rows) {
        const uint4 w = __ldcg(reinterpret_cast<const uint4*>(from + at_row * from_row) + at_place);
        hold[i].words[0] = w.x, hold[i].words[1] = w.y, hold[i].words[2] = w.z,
        hold[i].words[3] = w.w;
      }
    });
  }
  // Issues the first loads.
  __device__ __forceinline__ void ask(const FewTokensArgs& args) {
    from = args.x, from_row = args.x_row, rows = args.tokens, vectors = args.hidden / 8;
    all = rows * vectors;
    step_rows = kThreads / vectors, step_places = kThreads - step_rows * vectors;
    row = threadIdx.x / vectors, place = threadIdx.x - row * vectors;
    load(row, place);
  }
  // `largest`: one word per row, zero.
  template <FewScales kScales>
  __device__ __forceinline__ void take(char* to, int to_row, float* scales, uint32_t* largest) {
    constexpr bool kRows = kScales == FewScales::kRows;
    if (kRows) {
      int r0 = row, p0 = place;
      for (int base = 0; base < all; base += kHold * kThreads) {
        if (base > 0) load(r0, p0);
        each(r0, p0, [&](int i, int r, int) {
          if (base + i * kThreads >= all) return;
          if (vectors % 32 == 0) {
            const uint32_t most = warp_max(hold[i].largest());
            if (threadIdx.x % 32 == 0 && r < rows) atomicMax(&largest[r], most);
          } else if (r < rows) {
            atomicMax(&largest[r], hold[i].largest());
          }
        });
      }
      multipliers_sync();
    }
    const bool again = kRows && all > kHold * kThreads;
    int r0 = row, p0 = place;
    for (int base = 0; base < all; base += kHold * kThreads) {
      if (base > 0 || again) load(r0, p0);
      each(r0, p0, [&](int i, int r, int p) {
        if (base + i * kThreads >= all) return;
        const float scale = e4m3_scale(kRows ? largest[min(r, rows - 1)]
                                             : lanes_reduce<16>(hold[i].largest(), Max()));
        if (r >= rows) return;
        if (kRows && p == 0) scales[r] = scale;
        if (!kRows && threadIdx.x % 16 == 0) scales[(r * vectors + p) / 16] = scale;
        store_e4m3(to + r * to_row + p * 8, hold[i], __frcp_rn(scale));
      });
    }
  }
};

// Quantizes the rows between the halves, as soon as they are stored; one row per warp.
template <FewScales kScales>
__device__ __forceinline__ void take_inner(FewGrid& grid, unsigned valid, int rows, int columns,
                                           char* to, int to_row, float* scales, bool waits) {
  constexpr int kHold = kFewInnerMost / 256;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, vectors = columns / 8;
  Eight<BFloat16Source> hold[kHold];
  const auto ask = [&](int row, int i) {
    const int place = i * 32 + lane;
    if (place >= vectors) return;
    const uint4 w = ask_inner(grid, row * vectors + place);
    hold[i].words[0] = w.x, hold[i].words[1] = w.y, hold[i].words[2] = w.z, hold[i].words[3] = w.w;
  };
  const auto ask_all = [&](int row) {
    if (row >= rows || !(valid >> row & 1)) return;  // ids that name no expert have no row
#pragma unroll
    for (int i = 0; i < kHold; ++i) ask(row, i);
  };
  if (!waits) ask_all(warp);
  multipliers_sync();  // all have read x's rows, which these overwrite
  if (waits) {
    if (threadIdx.x == 0) {
      end_up(grid);
      wait_for_ends(grid);
    }
    multipliers_sync();
    ask_all(warp);
  }
  for (int row = warp; row < rows; ask_all(row += kFewWarps)) {
    if (!(valid >> row & 1)) continue;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kHold; ++i) {
      if (i * 32 >= vectors) break;
      if (i * 32 + lane >= vectors) hold[i].fill(~0u);
      while (!all_there(hold[i].words)) ask(row, i);
#pragma unroll
      for (uint32_t& word : hold[i].words) word = ~word;
      largest = max(largest, hold[i].largest());
    }
    float scale = e4m3_scale(warp_max(largest));
    if (kScales == FewScales::kRows && lane == 0) scales[row] = scale;
#pragma unroll
    for (int i = 0; i < kHold; ++i) {
      if (i * 32 >= vectors) break;
      const int place = i * 32 + lane;
      if (kScales == FewScales::kBlocks) {
        scale = e4m3_scale(lanes_reduce<16>(hold[i].largest(), Max()));
        if (lane % 16 == 0 && place < vectors) scales[(row * vectors + place) / 16] = scale;
      }
      if (place < vectors) store_e4m3(to + row * to_row + place * 8, hold[i], __frcp_rn(scale));
    }
  }
}

}  // namespace tiercel

#endif  // KERNELS_MOE_FEW_TOKENS_ROWS_CUH_
