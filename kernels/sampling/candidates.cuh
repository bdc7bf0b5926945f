// SPDX-License-Identifier: Apache-2.0
// top-k, top-p and the choice where few tokens may be drawn: all are compared with all.
#ifndef KERNELS_SAMPLING_CANDIDATES_CUH_
#define KERNELS_SAMPLING_CANDIDATES_CUH_

#include <cstdint>

#include "kernels/sampling/row.cuh"

namespace tiercel {

// Groups that reached_by() tells apart.
inline constexpr int kReach = 256;

// A number that at least `least` of the groups' maxima reach, close to the smallest of them: a
// search by bits from the first in which the maxima differ. Their last `zeros` bits are 0. For one
// warp.
template <typename Top>
__device__ __forceinline__ float reached_by(int groups, int least, int zeros, Top top) {
  constexpr int kEach = kReach / 32;
  uint32_t keys[kEach];  // in the order of the numbers; 0 is none
  uint32_t low = 0xffffffffu, high = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    keys[i] = 0;
#pragma unroll 1
    for (int g = i * 32 + threadIdx.x % 32; g < groups; g += kReach) {
      const int bits = __float_as_int(top(g));
      keys[i] = max(keys[i], static_cast<uint32_t>(bits ^ (bits >> 31 | INT32_MIN)));
    }
    if (keys[i] != 0) low = min(low, keys[i]);
    high = max(high, keys[i]);
  }
  low = __reduce_min_sync(kFullWarp, low);
  high = __reduce_max_sync(kFullWarp, high);
  const int first = 31 - __clz(low ^ high);
  uint32_t found = first < 0 ? low : low & ~((2u << first) - 1);
#pragma unroll 1
  for (int bit = first; bit >= zeros; --bit) {
    const uint32_t tried = found | 1u << bit;
    int count = 0;
#pragma unroll
    for (uint32_t key : keys) count += key >= tried ? 1 : 0;
    count = __reduce_add_sync(kFullWarp, count);
    if (count >= least) found = tried;
    if (count == least) break;
  }
  return __uint_as_float(found & 0x80000000u ? found ^ 0x80000000u : ~found);
}

// Lists each block's tokens up to the limit, if they are few; returns how many of the row there
// are, and the sum of their weights.
template <typename Format, typename Team>
__device__ __forceinline__ uint32_t gather(const Row<Format, Team>& row, uint64_t* mass) {
  if (row.thread() == 0) row.shared.candidates = 0;
  row.sync();
  uint64_t own = 0;
  row.each_segment(row.limit, [&](int segment) {
    if (*const_cast<volatile uint32_t*>(&row.shared.candidates) > kFew) return;
    row.each_of(segment, 0.0f, row.limit, [&](float d, int column) {
      const uint32_t place = atomicAdd(&row.shared.candidates, 1);
      if (place < kFew) row.shared.few[place] = {d, column};
      own += row.weight(d);
    });
  });
  row.publish(own);
  row.meet();
  uint32_t all = 0;
#pragma unroll 1
  for (uint32_t rank = 0; rank < row.blocks(); ++rank)
    all += min(row.shared.found[rank].x, kFew + 1);
  *mass = row.published();
  return all;
}

// Sends the block's candidates to the first block.
template <typename Format, typename Team>
__device__ __forceinline__ void send(const Row<Format, Team>& row, uint32_t rank) {
  uint32_t place = 0;
#pragma unroll 1
  for (uint32_t other = 0; other < rank; ++other) place += row.shared.found[other].x;
  for (uint32_t i = row.thread(); rank > 0 && i < row.shared.candidates; i += kSampleThreads) {
    const Candidate one = row.shared.few[i];
    store_remote(reinterpret_cast<float2*>(&row.shared.few[place + i]), 0,
                 make_float2(one.d, __int_as_float(one.column)));
  }
  row.meet();
}

// The first block chooses among `count` candidates: top_k and top_p 0 and 1 are none, and `whole`
// is what top_p is a share of, 0 for what top_k keeps.
template <bool kVerify, typename Format, typename Team>
__device__ __forceinline__ void choose(const Row<Format, Team>& row, int count, int top_k,
                                       float top_p, uint64_t whole, uint64_t random, Kept* found) {
  const int thread = row.thread();
  // Neighbouring threads share a candidate where there are enough threads.
  const int share = count <= kSampleThreads / 8   ? 8
                    : count <= kSampleThreads / 4 ? 4
                    : count <= kSampleThreads / 2 ? 2
                                                  : 1;
  const int i = thread / share, part = thread % share;
  const int others = i < count ? count : 0;
  if (thread < count) row.shared.weights[thread] = row.weight(row.shared.few[thread].d);
  row.sync();
  const Candidate mine = i < count ? row.shared.few[i] : Candidate{0.0f, -1};
  int larger = 0;
  uint64_t above = 0;
#pragma unroll 4
  for (int j = part; j < others; j += share) {
    const bool is_larger = row.shared.few[j].d < mine.d;
    larger += is_larger ? 1 : 0;
    above += is_larger ? row.shared.weights[j] : 0;
  }
#pragma unroll 1
  for (int offset = share / 2; offset > 0; offset /= 2) {
    larger += __shfl_xor_sync(kFullWarp, larger, offset);
    above += __shfl_xor_sync(kFullWarp, above, offset);
  }
  uint32_t own = 0;
  if (i < count && (top_k == 0 || larger < top_k)) own = row.shared.weights[i];
  if (top_p < 1.0f) {
    if (whole == 0) whole = row.block_sum(part == 0 ? own : 0);
    if (above >= part_of(top_p, whole)) own = 0;
  }
  const uint64_t kept = row.block_sum(part == 0 ? own : 0);  // all have read the weights
  if (i < count && part == 0) row.shared.weights[i] = own;
  row.sync();
  uint64_t before = 0;
#pragma unroll 4
  for (int j = part; j < others; j += share) {
    before += row.shared.few[j].column < mine.column ? row.shared.weights[j] : 0;
  }
#pragma unroll 1
  for (int offset = share / 2; offset > 0; offset /= 2) {
    before += __shfl_xor_sync(kFullWarp, before, offset);
  }
  if constexpr (kVerify) {
    if (thread == 0) row.shared.bin = 0;
    row.sync();
    if (own != 0) atomicMax(&row.shared.bin, __float_as_uint(mine.d));
    row.sync();
    if (thread == 0) {
      *found = {row.largest, row.scale, row.limit, 0.0f, 0xffffffffu, row.shared.bin, kept, kUnit};
    }
  }
  const uint64_t target = __umul64hi(random, kept);
  // One warp has the token.
  const bool is_chosen = before <= target && target - before < own;
  const unsigned chosen = __ballot_sync(kFullWarp, is_chosen);
  if (chosen == 0) return;
  const int lane = __ffs(chosen) - 1;
  row.write_token(__shfl_sync(kFullWarp, mine.column, lane), -__shfl_sync(kFullWarp, mine.d, lane));
}

}  // namespace tiercel

#endif  // KERNELS_SAMPLING_CANDIDATES_CUH_
