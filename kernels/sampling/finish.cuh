// SPDX-License-Identifier: Apache-2.0
// From the segments' maxima and sums to the token.
#ifndef KERNELS_SAMPLING_FINISH_CUH_
#define KERNELS_SAMPLING_FINISH_CUH_

#include <cstdint>

#include "kernels/sampling/candidates.cuh"
#include "kernels/sampling/row.cuh"
#include "kernels/sampling/sample_kernels.h"
#include "kernels/sampling/threshold.cuh"
#include "kernels/sampling/values.cuh"

namespace tiercel {

// A row's parameters.
struct Rules {
  float scale, top_p, min_p;
  int top_k;
  bool greedy, by_count, by_mass, filters;

  __device__ __forceinline__ Rules(const SampleArgs& args, int64_t place) {
    const float temperature = parameter(args.temperature, place);
    top_k = parameter(args.top_k, place);
    top_p = parameter(args.top_p, place);
    min_p = parameter(args.min_p, place);
    greedy = !(temperature > 0.0f);
    by_count = top_k > 0 && top_k < args.columns;
    by_mass = top_p < 1.0f;
    filters = by_count || by_mass || min_p > 0.0f;
    scale = fminf(fmaxf(kLog2E / temperature, 1e-30f), 1e30f);
  }

  // Then top-p is a share of all tokens' weights.
  __device__ __forceinline__ bool of_all() const { return by_mass && !by_count && !(min_p > 0.0f); }
  // True if the segments' sums are needed.
  __device__ __forceinline__ bool sums() const { return !greedy && (!filters || of_all()); }
};

// Finds and writes the token, by all threads of the team. `found` is what is kept of the row, with
// kVerify.
template <bool kVerify, typename Format, typename Team>
__device__ __forceinline__ void finish(Row<Format, Team>& row, const Rules& rules, Kept* found) {
  const SampleArgs& args = row.args;
  const int lane = threadIdx.x % 32, warp = row.thread() / 32;
  const uint32_t rank = row.blocks() > 1 ? cluster_rank() : 0;
  // Rows that are not held have a top-k.
  const bool greedy = rules.greedy, by_mass = rules.by_mass;
  const bool by_count = !Team::kHeld || rules.by_count;
  const bool grouped = row.grouped();
  float largest = -kInfinity;
#pragma unroll 1
  for (int s = lane; s < args.segments; s += 32) largest = max_or_nan(largest, row.segments[s].x);
  row.largest = largest = warp_largest(largest);
  if (largest != largest || largest == -kInfinity) {
    if (rank == 0 && row.thread() == 0) {
      row.write(-1, __int_as_float(0x7fc00000));
      if constexpr (kVerify) *found = {};
    }
    return;
  }

  const bool filters =
      !Team::kHeld || rules.filters || largest == kInfinity;  // only these tokens have weight
  if (warp != 0 && (greedy || !filters)) return;
  // 2^-32 and less are no weight.
  row.limit = 32.0f / row.scale;
  Bound bound{0xffffffffu, 0xffffffffu};
  uint64_t all = 0,
           target = 0;  // of filtered rows: the weight that is kept, and where in the block
  bool has_target = true;
  if (filters && !greedy) {
    if (rules.min_p > 0.0f)
      row.limit = fminf(row.limit, fmaxf(-log2f(rules.min_p), 0.0f) / row.scale);
    uint64_t whole = 0;
    bool few = true;  // candidates may be enough for top-p
    if (Team::kHeld && rules.of_all() && largest < kInfinity) {
      float heads = 0.0f;  // the segments' largest weights
#pragma unroll 1
      for (int s = lane; s < args.segments; s += 32) {
        whole += row.segment_weight(s, kUnit);
        heads += exp2_approx((row.segments[s].x - largest) * row.scale);
      }
      whole = warp_sum(whole);
      heads = lanes_reduce<32>(heads, Sum());
      few = heads * kUnit * max(kFew / args.segments, 2) >= rules.top_p * static_cast<float>(whole);
      // All smaller ones together are less than what top-p leaves out.
      const float least = (1.0f - fmaxf(rules.top_p, 0.0f)) / (2.0f * args.columns);
      row.limit = fminf(row.limit, -log2f(least) / row.scale);
    }
    // k groups have a token at least as large as the k-th largest maximum of the groups.
    const int groups = grouped ? kGroups * args.segments : args.segments;
    const int least = by_count ? rules.top_k : whole > 0 && few ? min(groups * 3 / 4, 100) : 0;
    const float limit = row.limit;
    if (0 < least && least <= min(groups, kReach)) {
      if (warp == 0) {
        const auto top = [&](int g) { return grouped ? row.shared.tops[g] : row.segments[g].x; };
        constexpr int kZeros = Format::kPerWord == 2 ? 13 : 0;  // of the logits' format in float32
        const float reached = reached_by(groups, least, kZeros, top);
        if (lane == 0) row.shared.bound = row.distance(reached);
      }
      row.sync();
      row.limit = fminf(row.limit, row.shared.bound);
    }
    uint64_t mass = 0;
    if (few) {
      const uint32_t count = gather(row, &mass);
      const bool enough = whole == 0 || row.limit == limit || mass >= part_of(rules.top_p, whole);
      if (count <= kFew && enough) {
        send(row, rank);
        if (rank == 0) {
          choose<kVerify>(row, count, by_count ? rules.top_k : 0, by_mass ? rules.top_p : 1.0f,
                          whole, row.shared.random, found);
        }
        return;
      }
    }
    if (!by_count) row.limit = limit;
    row.origin = __uint_as_float((__float_as_uint(row.limit) & 0x7f800000u) + 0x00800000u);
    uint2 window = make_uint2(0, (1u << kFixedBits) - 1);
    uint64_t amount = rules.top_k;
    int pass = by_count ? 0 : 1;
    if (whole > 0) {
      amount = part_of(rules.top_p, whole);
      window = guess(row, amount, whole);
      if constexpr (Format::kPerWord == 2 && !kVerify) {
        if (select_by_value(row, amount, window, &bound, &mass)) pass = 2;
      }
    } else if (!by_count) {
      amount = 0;
    }
    // First top-k, then top-p: the code is there once.
#pragma unroll 1
    for (; pass < (by_mass ? 2 : 1); ++pass) {
      bound = select(row, bound, pass == 1, amount, rules.top_p, window, &mass);
      amount = 0;
    }
    float farthest = fminf(row.limit, __uint_as_float(min(bound.bits, 0x7f800000u)));
    if (bound.fixed < (1u << kFixedBits) - 1) {
      farthest = fminf(farthest, row.of_fixed(bound.fixed) + 2.0f * row.step());
    }
    // The kept tokens' weight in a segment, a lane's part.
    const auto kept_in = [&](int segment) {
      uint64_t own = 0;
      row.each_of(segment, 0.0f, farthest, [&](float d, int) {
        if (row.within(d, bound)) own += row.weight(d);
      });
      return own;
    };
    if constexpr (Team::kHeld) {
      if (!by_count && !by_mass) {
        mass = 0;
        row.each_segment(farthest, [&](int segment) { mass += kept_in(segment); });
        row.meet();  // all have read what gather() published
      }
      row.publish(mass);
      row.meet();
      all = row.published();
      target = __umul64hi(row.shared.random, all);
#pragma unroll 1
      for (uint32_t other = 0; other < rank; ++other) target -= row.published(other);
      // Other blocks' targets are beyond their weights, or have wrapped around.
      has_target = target < row.published(rank);
    }
    if (has_target) {
#pragma unroll 1
      for (int segment = row.first + warp; segment < row.last; segment += kWarps) {
        if (lane == 0) row.masses[segment] = 0;
      }
      row.each_segment(farthest, [&](int segment) {
        const uint64_t own = warp_sum(kept_in(segment));
        if (lane == 0) row.masses[segment] = own;
      });
      row.sync();
    }
  }
  if (warp != 0) return;

  if constexpr (kVerify) {
    if (!greedy && !filters) {
#pragma unroll 1
      for (int s = lane; s < args.segments; s += 32) all += row.segment_weight(s, kFineUnit);
      all = warp_sum(all);
    }
    if (rank == 0 && lane == 0) {
      *found = {largest,
                row.scale,
                filters ? row.limit : kInfinity,
                filters ? row.origin : 0.0f,
                bound.fixed,
                bound.bits,
                all,
                filters ? kUnit : kFineUnit};
    }
  }
  if (!has_target) return;
  uint64_t remains = 0;
  int segment;
  if (greedy) {
    segment = row.segment_of(largest);
  } else {
    const auto amount = [&](int s) {
      if (!filters) return row.segment_weight(s, kFineUnit);
      return row.has(s) ? row.masses[s] : uint64_t{0};
    };
    segment = row.find_segment(
        // The sum of one block's segments is not that of all.
        [&](uint64_t sum) {
          return filters && Team::kHeld ? target : __umul64hi(row.shared.random, sum);
        },
        amount, &remains);
  }
  if (!row.has(segment)) return;
  const int column = row.find_column(segment, remains, [&](float x) {
    const float d = row.distance(x);
    if (greedy) return static_cast<uint64_t>(x == largest ? 1 : 0);
    if (filters) return static_cast<uint64_t>(row.within(d, bound) ? row.weight(d) : 0);
    return row.fine_weight(x);
  });
  row.write_token(column, row.value_at(column) - largest);
}

}  // namespace tiercel

#endif  // KERNELS_SAMPLING_FINISH_CUH_
