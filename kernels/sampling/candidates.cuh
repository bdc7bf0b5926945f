// SPDX-License-Identifier: Apache-2.0
// top-k, top-p and the choice where few tokens may be drawn: all are compared with all.
#ifndef KERNELS_SAMPLING_CANDIDATES_CUH_
#define KERNELS_SAMPLING_CANDIDATES_CUH_

#include <cstdint>

#include "kernels/sampling/row.cuh"

namespace tiercel {

// Lists each block's tokens up to the limit, if they are few; returns how many of the row there
// are, and the sum of their weights.
template <typename Format>
__device__ __forceinline__ uint32_t gather(const Row<Format>& row, uint64_t* mass) {
  if (threadIdx.x == 0) row.shared.candidates = 0;
  __syncthreads();
  const int vectors = (row.last - row.first) * (kSampleSegment / kPerVector<Format>);
  uint64_t own = 0;
#pragma unroll 2
  for (int v = threadIdx.x; v < vectors; v += kSampleThreads) {
    uint32_t words[4];
    float values[kPerVector<Format>];
    load_vector(words, &row.held[v]);
    unpack<Format>(words, values);
    float most = values[0];
#pragma unroll
    for (float x : values) most = fmaxf(most, x);
    if (!(row.distance(most) <= row.limit)) continue;
    if (*const_cast<volatile uint32_t*>(&row.shared.candidates) > kFew) break;
    uint32_t hits = 0;
#pragma unroll
    for (int i = 0; i < kPerVector<Format>; ++i) {
      hits |= row.distance(values[i]) <= row.limit ? 1u << i : 0;
    }
    for (; hits != 0; hits &= hits - 1) {
      const int column = row.first * kSampleSegment + v * kPerVector<Format> + __ffs(hits) - 1;
      const float d = row.distance(row.value_at(column));
      const uint32_t place = atomicAdd(&row.shared.candidates, 1);
      if (place < kFew) row.shared.few[place] = {d, column};
      own += row.weight(d);
    }
  }
  row.publish(own);
  row.meet();
  uint32_t all = 0;
#pragma unroll 1
  for (uint32_t rank = 0; rank < row.args.blocks; ++rank)
    all += min(row.shared.found[rank].x, kFew + 1);
  *mass = row.published();
  return all;
}

// Sends the block's candidates to the first block.
template <typename Format>
__device__ __forceinline__ void send(const Row<Format>& row, uint32_t rank) {
  uint32_t place = 0;
#pragma unroll 1
  for (uint32_t other = 0; other < rank; ++other) place += row.shared.found[other].x;
  for (uint32_t i = threadIdx.x; rank > 0 && i < row.shared.candidates; i += kSampleThreads) {
    const Candidate one = row.shared.few[i];
    store_remote(reinterpret_cast<float2*>(&row.shared.few[place + i]), 0,
                 make_float2(one.d, __int_as_float(one.column)));
  }
  row.meet();
}

// The first block chooses among `count` candidates: top_k and top_p 0 and 1 are none, and `whole`
// is what top_p is a share of, 0 for what top_k keeps.
template <typename Format>
__device__ __forceinline__ void choose(const Row<Format>& row, int count, int top_k, float top_p,
                                       uint64_t whole, uint64_t random) {
  constexpr int kOwn = kFew / kSampleThreads;
  const int thread = threadIdx.x;
  // Neighbouring threads share a candidate where there are enough threads.
  const int share = count <= kSampleThreads / 8   ? 8
                    : count <= kSampleThreads / 4 ? 4
                    : count <= kSampleThreads / 2 ? 2
                                                  : 1;
  const int part = thread % share;
  const auto candidate = [&](int n) { return thread / share + n * kSampleThreads; };
  for (int i = thread; i < count; i += kSampleThreads) {
    row.shared.weights[i] = row.weight(row.shared.few[i].d);
  }
  __syncthreads();
  uint32_t own[kOwn] = {};
  uint64_t above[kOwn] = {};
  uint64_t kept = 0;
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    const int i = candidate(n);
    const float d = i < count ? row.shared.few[i].d : 0.0f;
    int larger = 0;
#pragma unroll 4
    for (int j = i < count ? part : count; j < count; j += share) {
      const bool is_larger = row.shared.few[j].d < d;
      larger += is_larger ? 1 : 0;
      above[n] += is_larger ? row.shared.weights[j] : 0;
    }
    for (int offset = share / 2; offset > 0; offset /= 2) {
      larger += __shfl_xor_sync(kFullWarp, larger, offset);
      above[n] += __shfl_xor_sync(kFullWarp, above[n], offset);
    }
    if (i < count) own[n] = top_k == 0 || larger < top_k ? row.shared.weights[i] : 0;
    kept += part == 0 ? own[n] : 0;
  }
  if (top_p < 1.0f) {
    const uint64_t target = part_of(top_p, whole == 0 ? row.block_sum(kept) : whole);
    kept = 0;
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      if (above[n] >= target) own[n] = 0;
      kept += part == 0 ? own[n] : 0;
    }
  }
  kept = row.block_sum(kept);  // all have read the weights
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    if (candidate(n) < count && part == 0) row.shared.weights[candidate(n)] = own[n];
  }
  __syncthreads();
  const uint64_t target = __umul64hi(random, kept);
  int column = -1;
  float d = 0.0f;
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    const int i = candidate(n);
    const Candidate mine = i < count ? row.shared.few[i] : Candidate{0.0f, -1};
    uint64_t before = 0;
#pragma unroll 4
    for (int j = i < count ? part : count; j < count; j += share) {
      before += row.shared.few[j].column < mine.column ? row.shared.weights[j] : 0;
    }
    for (int offset = share / 2; offset > 0; offset /= 2) {
      before += __shfl_xor_sync(kFullWarp, before, offset);
    }
    if (before <= target && target - before < own[n]) column = mine.column, d = mine.d;
  }
  // One warp has the token.
  const unsigned chosen = __ballot_sync(kFullWarp, column >= 0);
  if (chosen == 0) return;
  const int lane = __ffs(chosen) - 1;
  row.write_token(__shfl_sync(kFullWarp, column, lane), -__shfl_sync(kFullWarp, d, lane));
}

}  // namespace tiercel

#endif  // KERNELS_SAMPLING_CANDIDATES_CUH_
