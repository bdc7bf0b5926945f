// SPDX-License-Identifier: Apache-2.0
// The threshold of top-k or top-p by histograms, for rows with many candidates.
#ifndef KERNELS_SAMPLING_THRESHOLD_CUH_
#define KERNELS_SAMPLING_THRESHOLD_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/sampling/row.cuh"
#include "kernels/sm90/load_remote.cuh"

namespace tiercel {

// True if no two numbers of the logits' format are within these points.
template <typename Format, typename Team>
__device__ __forceinline__ bool has_one_value(const Row<Format, Team>& row, uint32_t begin,
                                              uint32_t extent) {
  const float step = row.step();
  const float near = row.largest - begin * step, far = near - (extent + 1) * step;
  const float least = (near > 0.0f) == (far > 0.0f) ? fminf(fabsf(near), fabsf(far)) : 0.0f;
  // Neighbours are at least this part of themselves apart.
  constexpr float kApart = Format::kPerWord == 1              ? 1.0f / (1 << 24)
                           : std::is_same_v<Format, BFloat16> ? 1.0f / (1 << 8)
                                                              : 1.0f / (1 << 11);
  return least * kApart > 2.0f * (extent + 3) * step;
}

// A thread's two bins.
struct Bins {
  uint32_t tokens[2];
  uint64_t masses[2];
  uint64_t own[2];  // masses of this block alone
  uint64_t start;   // the running sum ahead of them, of tokens or masses
};

// Adds up the bins over the cluster, so that all blocks get the same. Returns the sum of all bins.
template <typename Format, typename Team>
__device__ __forceinline__ uint64_t add_bins(const Row<Format, Team>& row, bool by_mass,
                                             Bins* bins) {
  const uint32_t thread = row.thread();
  *bins = {};
#pragma unroll 2
  for (uint32_t rank = 0; rank < row.blocks(); ++rank) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t bin = 2 * thread + i;
      bins->tokens[i] += load_remote(&row.shared.counts[bin], rank);
      bins->masses[i] += static_cast<uint64_t>(load_remote(&row.shared.high[bin], rank)) << 32 |
                         load_remote(&row.shared.low[bin], rank);
    }
  }
  uint64_t both = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t bin = 2 * thread + i;
    bins->own[i] = static_cast<uint64_t>(row.shared.high[bin]) << 32 | row.shared.low[bin];
    both += by_mass ? bins->masses[i] : bins->tokens[i];
  }
  uint64_t running = warp_running_sum(both);
  if (thread % 32 == 31) row.shared.of_warps[thread / 32] = running;
  row.sync();
  uint64_t all = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp < thread / 32) running += row.shared.of_warps[warp];
    all += row.shared.of_warps[warp];
  }
  bins->start = running - both;
  return all;
}

template <typename Format, typename Team>
__device__ __forceinline__ void clear_bins(const Row<Format, Team>& row) {
  for (int bin = row.thread(); bin < kSampleBins; bin += kSampleThreads) {
    row.shared.counts[bin] = row.shared.low[bin] = row.shared.high[bin] = 0;
  }
  row.sync();
}

template <typename Format, typename Team>
__device__ __forceinline__ void add_to_bin(const Row<Format, Team>& row, uint32_t bin,
                                           uint32_t mass) {
  const uint32_t old = atomicAdd(&row.shared.low[bin], mass);
  if (old + mass < old) atomicAdd(&row.shared.high[bin], 1);
}

// Estimates where the tokens with `target` of the `whole` weight end: the first point and the
// extent, in fixed point, of a window around it. The weight behind a point is estimated by every
// 16th token: there are many such tokens, and none of them weighs much.
template <typename Format, typename Team>
__device__ __forceinline__ uint2 guess(const Row<Format, Team>& row, uint64_t target,
                                       uint64_t whole) {
  constexpr int kShift = kFixedBits - kBinBits;
  constexpr int kWords = kSampleSegment / Format::kPerWord, kParts = kWords / 32;
  clear_bins(row);
  row.each_segment(row.limit, [&](int segment) {
    const auto* words = reinterpret_cast<const uint32_t*>(row.logits_of(segment));
#pragma unroll
    for (int part = 0; part < kParts; part += kSampled) {
      const int place = (part + segment % kSampled) * 32 + threadIdx.x % 32;
      float values[Format::kPerWord];
      Format::unpack(words[place], values);
#pragma unroll
      for (float x : values) {
        const float d = row.distance(x);
        if (d <= row.limit) add_to_bin(row, row.fixed(d) >> kShift, row.weight(d));
      }
    }
  });
  row.meet();
  Bins bins;
  const uint64_t all = add_bins(row, true, &bins);
  const float rest = static_cast<float>(whole - target) * (1.0f / kSampled);
  const uint64_t most = __float2ull_rn(rest * (1.0f + kMargin));
  const uint64_t least = __float2ull_rn(rest * (1.0f - kMargin));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // The bins at which no more than that is behind.
    const uint64_t behind = all - bins.start, next = behind - bins.masses[i];
    const uint32_t bin = 2 * row.thread() + i;
    if ((behind > most || bin == 0) && next <= most) row.shared.bin = bin;
    if ((behind > least || bin == 0) && next <= least) row.shared.tokens = bin;
    bins.start += bins.masses[i];
  }
  row.meet();
  return make_uint2(row.shared.bin << kShift,
                    ((row.shared.tokens - row.shared.bin + 1) << kShift) - 1);
}

// The least bound at which the tokens within `bound` are `target` tokens, or have that weight. A
// target of 0 is `share` of their weight. The search begins in a window of d in fixed point. The
// sum of the threads' `keeps` is the weight of the block's tokens within the new bound.
template <typename Format, typename Team>
__device__ __forceinline__ Bound select(const Row<Format, Team>& row, Bound bound, bool by_mass,
                                        uint64_t target, float share, uint2 window,
                                        uint64_t* keeps) {
  const uint32_t thread = row.thread();
  bool in_bits = false;  // of d itself, among those with the same d in fixed point
  uint32_t same = 0, lowest = window.x, extent = window.y;
  uint32_t below = lowest;  // tokens below this point are added up, but have no bins
  int shift = max(32 - __clz(extent) - kBinBits, 0);
  uint64_t before = 0;
  bool partial = extent < (1u << kFixedBits) - 1;
  *keeps = 0;
  for (bool begins = true;;) {
    clear_bins(row);
    uint64_t own = 0;
    const uint32_t end_point = lowest + extent;
    float from = 0.0f, to = row.limit;
    if (in_bits) {
      from = __uint_as_float(lowest), to = __uint_as_float(end_point);
    } else {
      if (below == 0 && lowest > 0) from = row.of_fixed(lowest) - 2.0f * row.step();
      if (end_point < (1u << kFixedBits) - 1) {
        to = fminf(to, row.of_fixed(end_point) + 2.0f * row.step());
      }
    }
    // Closer tokens are below, without a look at their fixed point.
    const float sure = below > 0 ? row.of_fixed(below) - 2.0f * row.step() : 0.0f;
    const auto add = [&](float d, int) {
      const uint32_t mass = row.weight(d);
      if (d < sure) {
        own += mass;
        return;
      }
      const uint32_t point = row.fixed(d), bits = __float_as_uint(d);
      if (point > bound.fixed || bits > bound.bits || (in_bits && point != same)) return;
      if (point < below) {
        own += mass;
        return;
      }
      const uint32_t place = (in_bits ? bits : point) - lowest;
      if (place > extent) return;
      const uint32_t bin = place >> shift;
      atomicAdd(&row.shared.counts[bin], 1);
      add_to_bin(row, bin, mass);
    };
    row.each_segment(to, [&](int segment) { row.each_of(segment, from, to, add); });
    if (below > 0) row.publish(own);
    row.meet();
    if (below > 0) before = row.published();
    Bins bins;
    const uint64_t all = add_bins(row, by_mass, &bins);
    if (partial && (target <= before || target > before + all)) {
      // The window was wrong: the search begins again with all.
      below = lowest = 0, before = 0;
      partial = false;
      extent = (1u << kFixedBits) - 1;
      shift = kFixedBits - kBinBits;
      row.meet();
      continue;
    }
    if (!partial && begins) {
      if (target == 0) target = part_of(share, all);
      if (all < target) {
        *keeps = bins.own[0] + bins.own[1];
        row.meet();
        return bound;
      }
    }
    below = 0;
    begins = partial = false;
    *keeps += own;
    uint64_t start = bins.start + before;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint64_t amount = by_mass ? bins.masses[i] : bins.tokens[i];
      if (start < target && target <= start + amount) {
        row.shared.bin = 2 * thread + i;
        row.shared.before = start;
        row.shared.amount = amount;
        row.shared.tokens = bins.tokens[i];
      }
      start += amount;
    }
    row.meet();  // before the next histogram too
    const uint32_t begin = lowest + (row.shared.bin << shift);
    extent = (1u << shift) - 1;
    const uint32_t end = begin + extent;
    before = row.shared.before;
    const bool whole = row.shared.tokens == 1 ||
                       (!by_mass && before + row.shared.amount == target) ||
                       (in_bits ? shift == 0 : has_one_value(row, begin, extent));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t bin = 2 * thread + i, found = row.shared.bin;
      if (bin < found || (whole && bin == found)) *keeps += bins.own[i];
    }
    if (whole) {
      if (in_bits) {
        bound.fixed = min(bound.fixed, same);
        bound.bits = min(bound.bits, end);
      } else {
        bound.fixed = min(bound.fixed, end);
      }
      return bound;
    }
    lowest = begin;
    if (shift > 0) {
      shift = max(shift - kBinBits, 0);
    } else {
      // All of a bin have the same d in fixed point, up to a rounding.
      in_bits = true;
      same = begin;
      const float about = row.of_fixed(begin), step = row.step();
      lowest = __float_as_uint(fmaxf(about - step, 0.0f));
      extent = __float_as_uint(about + step) - lowest;
      shift = max(32 - __clz(extent) - kBinBits, 0);
    }
  }
}

}  // namespace tiercel

#endif  // KERNELS_SAMPLING_THRESHOLD_CUH_
