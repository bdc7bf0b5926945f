// SPDX-License-Identifier: Apache-2.0
// The threshold of top-p alone for 16-bit logits: tokens of each number are counted.
#ifndef KERNELS_SAMPLING_VALUES_CUH_
#define KERNELS_SAMPLING_VALUES_CUH_

#include <cstdint>

#include "kernels/sampling/row.cuh"
#include "kernels/sm90/load_remote.cuh"

namespace tiercel {

// 16-bit numbers as integers of the same order, and back.
__device__ __forceinline__ uint32_t key_of(uint32_t bits) {
  return bits ^ ((bits & 0x8000u) != 0 ? 0xffffu : 0x8000u);
}
__device__ __forceinline__ uint32_t bits_of(uint32_t key) {
  return key ^ ((key & 0x8000u) != 0 ? 0x8000u : 0xffffu);
}

// select() for the weight `target` of all tokens, if it ends at a number in the window that is
// among the largest: returns false otherwise. All tokens with the same number weigh the same, so a
// token takes one addition, and a number one multiplication.
template <typename Format, typename Team>
__device__ __forceinline__ bool select_by_value(const Row<Format, Team>& row, uint64_t target,
                                                uint2 window, Bound* bound, uint64_t* keeps) {
  constexpr uint32_t kEach = kSampleValues / kSampleThreads;
  constexpr int kColumns = kPerVector<Format>;
  const uint32_t thread = row.thread(), lane = thread % 32;
  const uint32_t end_point = window.x + window.y;
  float to = row.limit;
  if (end_point < (1u << kFixedBits) - 1) {
    to = fminf(to, row.of_fixed(end_point) + 2.0f * row.step());
  }
  const uint32_t top = key_of(Format::to_bits(row.largest + 0.0f));  // -0 is no larger than 0
  const uint32_t low = key_of(Format::to_bits(row.low_of(to))) - 1;  // below, whatever the rounding
  const uint32_t numbers = top - low + 1;
  // -0 may come behind the last.
  if (numbers >= kSampleValues) return false;
  uint32_t* tallies = row.shared.tallies;
  for (uint32_t i = thread; i <= numbers; i += kSampleThreads) tallies[i] = 0;
  row.sync();
  const uint32_t least = bits_of(low) * 0x10001u;
  row.each_segment(to, [&](int segment) {
    const uint4* part = row.logits_of(segment) + lane;
    uint32_t hits = 0;
#pragma unroll
    for (int i = 0; i < 32 / kColumns; ++i) {
      uint32_t words[4];
      load_vector(words, &part[i * 32]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        hits |= pairs_at_least<Format>(words[k], least) & (0x10001u << (i * 4 + k));
      }
    }
#pragma unroll 1
    for (; hits != 0; hits &= hits - 1) {
      const uint32_t hit = __ffs(hits) - 1;
      const uint32_t inside = hit / 4 % 4 * 32 * kVectorBytes + hit % 4 * 4 + hit / 16 * 2;
      const uint32_t bits =
          *reinterpret_cast<const uint16_t*>(reinterpret_cast<const char*>(part) + inside);
      atomicAdd(&tallies[top - key_of(bits)], 1);
    }
  });
  row.meet();

  // A thread has a few numbers that follow each other.
  const auto distance = [&](uint32_t number) {
    return row.distance(Format::from_bits(bits_of(top - number)));
  };
  const auto mass = [&](uint32_t number, uint32_t count) {
    return static_cast<uint64_t>(count) * row.weight(distance(number));
  };
  const uint32_t each = numbers / kSampleThreads + 1;
  uint32_t counts[kEach];
  uint64_t both = 0;
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    const uint32_t number = thread * each + i;
    counts[i] = 0;
    // Tallies of numbers beyond the window are incomplete.
    if (i >= each || number > numbers || !(distance(number) <= to)) continue;
    // Several loads at a time.
#pragma unroll 4
    for (uint32_t rank = 0; rank < row.blocks(); ++rank) {
      counts[i] += load_remote(&tallies[number], rank);
    }
    both += mass(number, counts[i]);
  }
  uint64_t running = warp_running_sum(both);
  if (lane == 31) row.shared.of_warps[thread / 32] = running;
  row.sync();
  uint64_t all = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp < thread / 32) running += row.shared.of_warps[warp];
    all += row.shared.of_warps[warp];
  }
  uint64_t start = running - both;
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    const uint32_t number = thread * each + i;
    const uint64_t next = start + (counts[i] == 0 ? 0 : mass(number, counts[i]));
    if (start < target && target <= next) row.shared.bound = distance(number);
    start = next;
  }
  if (all < target) {
    row.meet();  // others have read the tallies
    return false;
  }
  row.sync();
  const float far = row.shared.bound;
  bound->bits = __float_as_uint(far);
  *keeps = 0;
#pragma unroll 1
  for (uint32_t number = thread * each; number < (thread + 1) * each; ++number) {
    if (number > numbers) break;
    if (distance(number) <= far) *keeps += mass(number, tallies[number]);
  }
  return true;
}

}  // namespace tiercel

#endif  // KERNELS_SAMPLING_VALUES_CUH_
