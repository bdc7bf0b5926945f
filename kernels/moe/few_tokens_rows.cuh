// SPDX-License-Identifier: Apache-2.0
// Rows that fused_moe of few tokens multiplies weights with, quantised on their way.
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

// Rows of x to shared memory as fp8_quantize makes them, by all warps that multiply: eights of
// values, whichever row they are of, a thread each. `largest` is room for a word a row.
template <FewScales kScales>
__device__ __forceinline__ void take_rows(const char* from, int64_t from_row, int rows, int columns,
                                          char* to, int to_row, float* scales, uint32_t* largest) {
  constexpr int kHold = 2, kThreads = kFewWarps * 32;
  const int vectors = columns / 8, all = rows * vectors;
  const int step_rows = kThreads / vectors, step_places = kThreads - step_rows * vectors;
  const int first_row = threadIdx.x / vectors, first_place = threadIdx.x - first_row * vectors;
  if (kScales == FewScales::kRows) {
    if (threadIdx.x < rows) largest[threadIdx.x] = 0;
    multipliers_sync();
  }
  Eight<BFloat16Source> hold[kHold];
  // Calls what(i, row, place) for each of the kHold vectors from `row`, `place` on, which move on.
  const auto each = [&](int& row, int& place, auto&& what) {
#pragma unroll
    for (int i = 0; i < kHold; ++i) {
      what(i, row, place);
      row += step_rows, place += step_places;
      if (place >= vectors) place -= vectors, ++row;
    }
  };
  const auto load = [&](int i, int row, int place) {
    hold[i].clear();
    if (row < rows) {
      const uint4 w = __ldcg(reinterpret_cast<const uint4*>(from + row * from_row) + place);
      hold[i].words[0] = w.x, hold[i].words[1] = w.y, hold[i].words[2] = w.z,
      hold[i].words[3] = w.w;
    }
  };
  bool loaded = false;
  if (kScales == FewScales::kRows) {
    int load_row = first_row, load_place = first_place, row = first_row, place = first_place;
    for (int base = 0; base < all; base += kHold * kThreads) {
      each(load_row, load_place, load);
      each(row, place, [&](int i, int r, int) {
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
    loaded = all <= kHold * kThreads;
  }
  int load_row = first_row, load_place = first_place, row = first_row, place = first_place;
  for (int base = 0; base < all; base += kHold * kThreads) {
    if (!loaded) each(load_row, load_place, load);
    each(row, place, [&](int i, int r, int p) {
      if (base + i * kThreads >= all) return;
      constexpr bool kRows = kScales == FewScales::kRows;
      const float scale = e4m3_scale(kRows ? largest[min(r, rows - 1)]
                                           : lanes_reduce<16>(hold[i].largest(), Max()));
      if (r >= rows) return;
      if (kRows && p == 0) scales[r] = scale;
      if (!kRows && threadIdx.x % 16 == 0) scales[(r * vectors + p) / 16] = scale;
      store_e4m3(to + r * to_row + p * 8, hold[i], __frcp_rn(scale));
    });
  }
}

// Rows between the halves to shared memory, likewise, as soon as they are there: a warp a row.
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
    if (row >= rows || !(valid >> row & 1)) return;  // of no expert's ids there never is a row
#pragma unroll
    for (int i = 0; i < kHold; ++i) ask(row, i);
  };
  if (!waits) ask_all(warp);
  multipliers_sync();  // who reads x's rows, before others take their place
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
