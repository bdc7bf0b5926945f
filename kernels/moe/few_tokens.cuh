// SPDX-License-Identifier: Apache-2.0
// fused_moe for few tokens with float8 weights, in one launch.
//
// The plan. The weights of the experts that the ids name are read once, 3 * I * H bytes each (166
// MB at T 4, E 64, H 2048, I 1024: 39 us at 4.26 TB/s); everything else is latency that must not
// stop these loads. One thread block per multiprocessor, all resident (a cooperative launch):
//  - every warp routes the ids, one per lane. One thread of warp 16 keeps a ring of slots full by
//    bulk copies: units of 8 rows of the first half of w_up and their 8 partners in the second
//    half; then 16 rows of w_down of each expert. It needs no x, so it runs ahead of the other
//    warps, but with only as much in flight as keeps memory busy.
//  - meanwhile warps 0 to 15 quantise x, loaded right behind the ids, into shared memory. They
//    multiply in four groups (in eight for w_down of 5 to 8 experts, which then takes one turn),
//    each with units of its own: a unit's 16 rows by mma.sync with up to 8 tokens, K divided
//    between the group's warps, whose sums meet in shared memory. Up's results go to global memory
//    as bfloat16.
//  - three quarters of up's units are assigned in advance; the rest is taken dynamically, since
//    multiprocessors do not load equally fast and all wait for the last one.
//  - each block quantises all rows between the halves, one row per warp, as soon as they are
//    stored, which the rows' own values tell: while memory is busy, a word takes more than a
//    microsecond to a block and back, and a barrier takes three such round trips. Up to kFewWaits
//    rows a block first waits for a count of blocks, since polling few rows would only keep memory
//    busier. Stores before the count need not have arrived by then, so no block waits for its
//    stores.
//  - it multiplies them with 16 rows of w_down of every expert, and so has all k terms of 16
//    columns of y to add up.
// Results are those of the launches that this one replaces, except for the order of float32 sums
// along K: the same quantisation and rounding, the same order of the sum over k.
//
// Barriers: full[slot] and empty[slot] of the ring (the copy engine's bytes; the group's warps),
// known[i] (the loader announces a unit), named 1 (the multiplying warps), 2 (the routing is in
// shared memory), 3 and up (one per group: its warps' sums).
#ifndef KERNELS_MOE_FEW_TOKENS_CUH_
#define KERNELS_MOE_FEW_TOKENS_CUH_

#include <cstdint>

#include "kernels/activation/functions.cuh"
#include "kernels/moe/few_tokens_grid.cuh"
#include "kernels/moe/few_tokens_kernels.h"
#include "kernels/moe/few_tokens_loader.cuh"
#include "kernels/moe/few_tokens_rows.cuh"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/mbarrier.cuh"

namespace tiercel {

// c += a * b for a 16x32 and a 32x8 matrix, with words placed as for the 16-bit elements in
// warp_matrix.cuh.
__device__ __forceinline__ void multiply_e4m3(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                              uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 64 e4m3 values per row: two products. Any order along K will do that is the same for both sides.
__device__ __forceinline__ void multiply_e4m3(float (&c)[4], const uint4& low, const uint4& high,
                                              const uint4& b) {
  multiply_e4m3(c, low.x, high.x, low.y, high.y, b.x, b.y);
  multiply_e4m3(c, low.z, high.z, low.w, high.w, b.z, b.w);
}

__device__ __forceinline__ float few_activation(int which, float a, float b) {
  switch (which) {
    case 0:
      return Silu<false>::value(a) * b;
    case 1:
      return Gelu<false>::value(a) * b;
    case 2:
      return Relu<false>::value(a) * b;
    default:
      return Gelu<false>::value(a) * (b + 1.0f);
  }
}

// The multiplying warps in groups that share a unit, and a warp's place in its group.
template <int kGroups>
struct FewTeam {
  static constexpr int groups = kGroups, warps = kFewWarps / kGroups;
  int group, member;
  __device__ __forceinline__ explicit FewTeam(int warp)
      : group(warp / warps), member(warp % warps) {}
};

template <FewScales kScales>
__global__ void __launch_bounds__(kFewThreads, 1)
    fused_moe_few_tokens(const __grid_constant__ FewTokensArgs args) {
  extern __shared__ __align__(128) char shared[];
  constexpr bool kBlocks = kScales == FewScales::kBlocks;
  constexpr int kGroups = kFewGroups, kGroupWarps = kFewWarps / kGroups;
  char* const ring = shared;
  FewShared& s = *reinterpret_cast<FewShared*>(shared + args.slots * args.slot_bytes);
  float4* const parts = reinterpret_cast<float4*>(&s + 1);
  char* const rows = shared + args.x_offset;
  float* const down_scales = reinterpret_cast<float*>(shared + args.down_scales_offset);
  float* const row_scales = reinterpret_cast<float*>(shared + args.row_scales_offset);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == kFewWarps) {
    load_few_weights(args, s, ring, lane);
    return;
  }
  FewRouting routing;
  const int64_t asked = routing.ask(args, lane);
  FewX x;
  x.ask(args);
  if (threadIdx.x < kFewIds) s.largest[threadIdx.x] = 0;
  routing.make(args, asked, lane);
  const int expert_units = args.inner_size / 8;
  const int units = routing.entries * expert_units;
  const int tiles = args.hidden / kFewRows;
  const int my_tiles = blockIdx.x < tiles ? (tiles - 1 - blockIdx.x) / gridDim.x + 1 : 0;
  const int dealt = few_dealt(units);
  FewRing at;

  if (warp == 0) {
    if (routing.leads()) {
      s.expert[routing.entry] = routing.id;
      s.count[routing.entry] = static_cast<uint8_t>(routing.count);
    }
    if (routing.id >= 0) {
      s.element[routing.entry][routing.column] = lane;
      s.token[routing.entry][routing.column] = lane / args.per_token;
      s.weight[lane] = args.weights[lane];
    }
  }
  const int hidden_groups = args.hidden / 128, inner_groups = args.inner_size / 128;
  const int group = warp / kGroupWarps, member = warp % kGroupWarps;
  const int g = lane / 4, t = lane % 4;
  // Scales of a unit's rows of weights, or of their blocks along K, one per lane. Those of the
  // first unit are loaded before the weights: behind these they would queue for microseconds.
  const auto ask_scales = [&](int unit, int expert, float* first, float* second) {
    const int entry = unit / expert_units;
    const int i = (unit - entry * expert_units) * 8;
    const float* const scales = args.up_scale + static_cast<int64_t>(expert) * args.up_scale_expert;
    const int row = kBlocks ? i / 128 : i + g;
    const int place = kBlocks ? min(lane, hidden_groups - 1) : 0;
    *first = scales[row * args.up_scale_step + place];
    *second =
        scales[(row + (kBlocks ? inner_groups : args.inner_size)) * args.up_scale_step + place];
  };
  float first_scale = 1.0f, second_scale = 1.0f;
  if (group < dealt) {  // before the barrier: reads no shared memory of other warps
    const int unit = blockIdx.x + group * gridDim.x;
    ask_scales(unit, routing.expert_of(unit / expert_units), &first_scale, &second_scale);
  }
  asm volatile("bar.sync 2, %0;" ::"n"(kFewThreads) : "memory");
  x.take<kScales>(rows, args.hidden + kFewPad, row_scales, s.largest);
  multipliers_sync();
  const int down_many = kBlocks ? inner_groups : kFewRows;
  if (group == kGroups - 1) {  // its first unit is the last to arrive
    for (int set = member; set < my_tiles * routing.entries; set += kGroupWarps) {
      const int turn = set / routing.entries, entry = set - turn * routing.entries;
      const int tile = blockIdx.x + turn * gridDim.x;
      const float* from =
          args.down_scale + static_cast<int64_t>(s.expert[entry]) * args.down_scale_expert;
      float* to = down_scales + set * down_many;
      for (int j = lane; j < down_many; j += 32) {
        const int row = kBlocks ? tile / 8 : tile * kFewRows + j;
        async_copy_4(shared_address(to + j), from + row * args.down_scale_step + (kBlocks ? j : 0),
                     true);
      }
    }
  }
  async_copy_commit();
  FewGrid& grid = few_grids[s.before >> 30];
  if (warp == kFewWarps - 1) {
    clear_few_grid(s.before);
    if (lane == 0) arrive_at_few_grid();
  }

  int turn = 0;  // counts this group's units
  // The slot may have belonged to another group before. Without the first wait, a phase of `full`
  // that has not ended yet could be taken for the one after the next.
  const auto wait_full = [&] {
    mbarrier_wait(&s.empty[at.slot], at.phase ^ 1);
    mbarrier_wait(&s.full[at.slot], at.phase);
  };
  // Multiplies a unit's 16 rows, which lie in one slot or in two. The group's warps divide the
  // columns; the warp that returns true has their sums.
  const auto multiply = [&](auto team, int row_bytes, bool in_two, int row_of_g, int row_a,
                            int row_b, float first_blocks, float second_blocks, int groups,
                            float (&sum)[4]) {
    const char* b_at = rows + row_of_g * (row_bytes + kFewPad) + t * 16;
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const int one = at.slot;
    wait_full();
    const char* low_at = ring + at.slot * args.slot_bytes + g * row_bytes + t * 16;
    const char* high_at = low_at + 8 * row_bytes;
    at.advance(1, args.slots);
    const int other = at.slot;
    if (in_two) {
      wait_full();
      high_at = ring + at.slot * args.slot_bytes + g * row_bytes + t * 16;
      at.advance(1, args.slots);
    }
#pragma unroll 1
    for (int at_byte = team.member * 128; at_byte < row_bytes; at_byte += team.warps * 128) {
      const uint4 low[2] = {*reinterpret_cast<const uint4*>(low_at + at_byte),
                            *reinterpret_cast<const uint4*>(low_at + at_byte + 64)};
      const uint4 high[2] = {*reinterpret_cast<const uint4*>(high_at + at_byte),
                             *reinterpret_cast<const uint4*>(high_at + at_byte + 64)};
      float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      float (&first_sum)[4] = kBlocks ? part : c;
      float (&second_sum)[4] = kBlocks ? part : d;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 b = *reinterpret_cast<const uint4*>(b_at + at_byte + half * 64);
        multiply_e4m3(half == 0 ? first_sum : second_sum, low[half], high[half], b);
      }
      if constexpr (kBlocks) {
        const int block = at_byte / 128;  // along K, the same in all lanes
        const float low_scale = __shfl_sync(kFullWarp, first_blocks, block);
        const float high_scale = __shfl_sync(kFullWarp, second_blocks, block);
        const float x_a = row_scales[row_a * groups + block];
        const float x_b = row_scales[row_b * groups + block];
        c[0] = fmaf(part[0], x_a * low_scale, c[0]);
        c[1] = fmaf(part[1], x_b * low_scale, c[1]);
        c[2] = fmaf(part[2], x_a * high_scale, c[2]);
        c[3] = fmaf(part[3], x_b * high_scale, c[3]);
      }
    }
    __syncwarp();
    if (lane == 0) {
      // The slot's barrier expects the warps that a group has for up.
      mbarrier_arrive(&s.empty[one], kGroupWarps / team.warps);
      if (in_two) mbarrier_arrive(&s.empty[other], kGroupWarps / team.warps);
    }
    at.advance((team.groups - 1) * (in_two ? 2 : 1), args.slots);
    float4* const mine = parts + (team.group * 2 + turn % 2) * (team.warps * 32);
    mine[team.member * 32 + lane] = make_float4(c[0] + d[0], c[1] + d[1], c[2] + d[2], c[3] + d[3]);
    asm volatile("bar.sync %0, %1;" ::"r"(3 + team.group), "n"(team.warps * 32) : "memory");
    const bool ends = turn % team.warps == team.member;
    ++turn;
    if (!ends) return false;
    sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
#pragma unroll
    for (int w = 0; w < team.warps; ++w) {
      const float4 part = mine[w * 32 + lane];
      sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
    }
    return true;
  };

  at.advance(2 * group, args.slots);
  for (int n = group;; n += kGroups) {
    mbarrier_wait(&s.known[n % kFewKnown], n / kFewKnown & 1);
    const int unit = s.unit[n % kFewKnown];
    if (unit < 0) break;
    const int entry = unit / expert_units;
    const int from_i = (unit - entry * expert_units) * 8;
    if (n != group || n >= dealt) {
      ask_scales(unit, s.expert[entry], &first_scale, &second_scale);
    }
    const int count = s.count[entry];
    const auto token = [&](int column) { return s.token[entry][column < count ? column : 0]; };
    const int row_a = token(2 * t), row_b = token(2 * t + 1);
    float sum[4];
    if (!multiply(FewTeam<kGroups>(warp), args.hidden, true, token(g), row_a, row_b, first_scale,
                  second_scale, hidden_groups, sum)) {
      continue;
    }
    const int i = from_i + g;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bool there = 2 * t + j < count;
      float a = sum[j], b = sum[2 + j];
      if constexpr (!kBlocks) {
        const float x_scale = row_scales[j == 0 ? row_a : row_b];
        a *= x_scale * first_scale;
        b *= x_scale * second_scale;
      }
      const uint32_t bits = BFloat16::to_bits(few_activation(args.activation, a, b));
      if (there) store_inner(grid, s.element[entry][2 * t + j] * args.inner_size + i, bits);
    }
  }
  if (blockIdx.x >= tiles) {
    multipliers_sync();
    if (args.waits && threadIdx.x == 0) end_up(grid);
    return;
  }
  take_inner<kScales>(grid, routing.valid, args.tokens * args.per_token, args.inner_size, rows,
                      args.inner_size + kFewPad, row_scales, args.waits);
  async_copy_wait<0>();
  multipliers_sync();
  at = FewRing();
  at.advance(2 * s.taken, args.slots);
  const float* tile_scales = down_scales;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    FewRing next = at;
    next.advance(routing.entries, args.slots);
    const auto multiply_entries = [&](auto team) {
      at.advance(team.group, args.slots);
      for (int entry = team.group; entry < routing.entries; entry += team.groups) {
        const int count = s.count[entry];
        const auto element = [&](int column) {
          return s.element[entry][column < count ? column : 0];
        };
        const int row_a = element(2 * t), row_b = element(2 * t + 1);
        float sum[4];
        float blocks = 1.0f;
        if constexpr (kBlocks) {
          blocks = tile_scales[entry * inner_groups + min(lane, inner_groups - 1)];
        }
        if (!multiply(team, args.inner_size, false, element(g), row_a, row_b, blocks, blocks,
                      inner_groups, sum)) {
          continue;
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (2 * t + j >= count) continue;
          const int row = j == 0 ? row_a : row_b;
          const float weight = s.weight[row];
          float low = sum[j], high = sum[2 + j];
          if constexpr (!kBlocks) {
            low *= row_scales[row] * tile_scales[entry * kFewRows + g];
            high *= row_scales[row] * tile_scales[entry * kFewRows + 8 + g];
          }
          s.result[row][g] = BFloat16::from_bits(BFloat16::to_bits(low * weight));
          s.result[row][8 + g] = BFloat16::from_bits(BFloat16::to_bits(high * weight));
        }
      }
    };
    // One turn with twice the groups is shorter than two turns.
    if (routing.entries > kGroups && routing.entries <= 2 * kGroups) {
      multiply_entries(FewTeam<2 * kGroups>(warp));
    } else {
      multiply_entries(FewTeam<kGroups>(warp));
    }
    at = next;
    multipliers_sync();
    const int token = threadIdx.x / kFewRows, column = threadIdx.x % kFewRows;
    if (token < args.tokens) {
      float sum = 0.0f;
#pragma unroll 8
      for (int e = token * args.per_token; e < (token + 1) * args.per_token; ++e) {
        if (routing.valid >> e & 1) sum += s.result[e][column];
      }
      reinterpret_cast<uint16_t*>(
          args.y)[static_cast<int64_t>(token) * args.hidden + tile * kFewRows + column] =
          static_cast<uint16_t>(BFloat16::to_bits(sum));
    }
    multipliers_sync();
    tile_scales += routing.entries * (kBlocks ? inner_groups : kFewRows);
  }
}

}  // namespace tiercel

#endif  // KERNELS_MOE_FEW_TOKENS_CUH_
