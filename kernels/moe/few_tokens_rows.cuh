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

// Rows of bfloat16 to shared memory as fp8_quantize makes them, by all warps that multiply: eights
// of values, whichever row they are of, a thread each. With a scale a row, the rows' largest
// magnitudes are `known` (as a float's bits, in global memory) or else found first; `largest` is
// room for a word a row.
template <FewScales kScales>
__device__ __forceinline__ void take_rows(const char* from, int64_t from_row, int rows, int columns,
                                          char* to, int to_row, float* scales, uint32_t* largest,
                                          const uint32_t* known) {
  constexpr int kHold = kScales == FewScales::kRows ? 4 : 8, kThreads = kFewWarps * 32;
  const int vectors = columns / 8, all = rows * vectors;
  const int step_rows = kThreads / vectors, step_places = kThreads - step_rows * vectors;
  const int first_row = threadIdx.x / vectors, first_place = threadIdx.x - first_row * vectors;
  if (kScales == FewScales::kRows && known == nullptr) {
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
  if (kScales == FewScales::kRows && known == nullptr) {
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
    if (kScales == FewScales::kRows && base == 0) {
      if (threadIdx.x < rows) {
        const float scale =
            e4m3_scale(known == nullptr ? largest[threadIdx.x] : __ldcg(known + threadIdx.x));
        scales[threadIdx.x] = scale;
        largest[threadIdx.x] = __float_as_uint(__frcp_rn(scale));
      }
      multipliers_sync();
    }
    each(row, place, [&](int i, int r, int p) {
      if (base + i * kThreads >= all) return;
      char* const target = to + r * to_row;
      float inverse;
      if constexpr (kScales == FewScales::kRows) {
        inverse = __uint_as_float(largest[min(r, rows - 1)]);
      } else {
        const float scale = e4m3_scale(lanes_reduce<16>(hold[i].largest(), Max()));
        if (r < rows && threadIdx.x % 16 == 0) scales[(r * vectors + p) / 16] = scale;
        inverse = __frcp_rn(scale);
      }
      float values[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) values[e] = hold[i][e] * inverse;
      if (r < rows) {
        *reinterpret_cast<uint2*>(target + p * 8) =
            make_uint2(float4_to_e4m3x4(values), float4_to_e4m3x4(values + 4));
      }
    });
  }
}

}  // namespace tiercel

#endif  // KERNELS_MOE_FEW_TOKENS_ROWS_CUH_
