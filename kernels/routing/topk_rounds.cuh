// SPDX-License-Identifier: Apache-2.0
// Selects a row's k largest scores by one warp in k rounds; arithmetic of softmax weights.
#ifndef KERNELS_ROUTING_TOPK_ROUNDS_CUH_
#define KERNELS_ROUTING_TOPK_ROUNDS_CUH_

#include <cstdint>

#include "kernels/routing/row_scores.cuh"
#include "kernels/routing/score_keys.cuh"
#include "kernels/routing/sorting.cuh"
#include "kernels/routing/topk_softmax_kernels.h"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

// exp(score - largest), to one unit in the last place; NaN if `largest` is NaN or infinite.
__device__ __forceinline__ float exp_below(float score, float largest) {
  return expf(score - largest);
}

// 1 / value for a normal value; correctly rounded except in rare cases.
__device__ __forceinline__ float reciprocal(float value) {
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(value));
  return fmaf(estimate, fmaf(-value, estimate, 1.0f), estimate);
}

// numerator / denominator, correctly rounded except in rare cases; `inverse` is 1 / denominator.
__device__ __forceinline__ float quotient(float numerator, float denominator, float inverse) {
  const float estimate = numerator * inverse;
  return fmaf(fmaf(-estimate, denominator, numerator), inverse, estimate);
}

// A lane's part of the denominator over the whole row; four sums, to limit the rounding error.
template <typename Scores>
__device__ __forceinline__ float exp_sum(const Scores& scores, float largest) {
  float sums[4] = {};
  scores.for_each([&](int i, float score) { sums[i % 4] += exp_below(score, largest); });
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

__device__ __forceinline__ RowOfScores row_of(const TopkSoftmaxArgs& args, int64_t row) {
  const int experts = row < args.rows ? args.experts : 0;
  return {static_cast<const char*>(args.scores) + row * args.row_stride, args.inner_stride, experts,
          args.vector_bytes};
}

__device__ __forceinline__ void store_result(const TopkSoftmaxArgs& args, int64_t position,
                                             float weight, int index) {
  args.weights[position] = weight;
  if (args.int64_indices) {
    static_cast<int64_t*>(args.indices)[position] = index;
  } else {
    static_cast<int32_t*>(args.indices)[position] = index;
  }
}

// The warp's largest key.
__device__ __forceinline__ uint32_t warp_max_key(uint32_t key) { return warp_max(key); }
__device__ __forceinline__ uint64_t warp_max_key(uint64_t key) {
  const uint32_t score = static_cast<uint32_t>(key >> 32);
  const uint32_t best_score = warp_max(score);
  const uint32_t best_index = warp_max(score == best_score ? static_cast<uint32_t>(key) : 0);
  return static_cast<uint64_t>(best_score) << 32 | best_index;
}

// True if exact keys would have selected the same scores in the same order: the scores descend, and
// no score of the row above the last is missing. All lanes of a row get the same answer.
template <int kLanes, int kPlaces, typename Scores>
__device__ __forceinline__ bool is_exact(const Scores& scores, const float (&selected)[kPlaces],
                                         int lane, int k) {
  uint32_t ordered[kPlaces + 1];
  uint32_t last = 0xffffffffu;
#pragma unroll
  for (int p = 0; p < kPlaces; ++p) {
    ordered[p] = order_float(selected[p]);
    if (p * kLanes + lane < k) last = ordered[p] < last ? ordered[p] : last;
  }
  ordered[kPlaces] = 0;
  last = lanes_reduce<kLanes>(last, Min());

  int missing = 0;  // scores above the last selected one that are not selected
  const float last_score = __uint_as_float(last ^ (last & 0x80000000u ? 0x80000000u : 0xffffffffu));
  scores.for_each([&](int, float score) { missing += score <= last_score ? 0 : 1; });
#pragma unroll
  for (int p = 0; p < kPlaces; ++p) {
    const int place = p * kLanes + lane;
    const uint32_t offered = lane == 0 ? ordered[p + 1] : ordered[p];
    const uint32_t next =
        __shfl_sync(kFullWarp, kLanes == 1 ? ordered[p + 1] : offered, (lane + 1) % kLanes, kLanes);
    if (place + 1 < k && ordered[p] < next) missing += kTopkSoftmaxMaxExperts;
    if (place < k && ordered[p] > last) --missing;
  }
  return lanes_reduce<kLanes>(missing, Sum()) == 0;
}

// A sum of terms that descend, which loses next to nothing.
struct DescendingSum {
  float sum = 0.0f;
  float lost = 0.0f;  // the rounding error; exact, because the terms descend

  __device__ __forceinline__ void add(float term) {
    const float longer = sum + term;
    lost += term - (longer - sum);
    sum = longer;
  }
  __device__ __forceinline__ float total() const { return sum + lost; }
};

// Processes one row by a warp, from load to store, kUnrolled rounds at a time. Lane l < k gets the
// l-th index.
template <typename Keys, int kPerLane, int kUnrolled>
__device__ __forceinline__ int finish_row_by_rounds(const TopkSoftmaxArgs& args, int64_t row) {
  using Key = typename Keys::Key;
  constexpr int kBytes = kPerLane * Keys::kBytes;
  constexpr int kVectors = kBytes > 16 ? kBytes / 16 : 1;
  constexpr int kWords = kBytes / kVectors / 4;

  const int lane = threadIdx.x % 32;
  LaneScores<Keys, 32, kVectors, kWords> scores;
  scores.load(row_of(args, row), lane);
  Key keys[kPerLane];
  scores.keys_from(keys, 0);
  sort_descending(keys);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) keys[i] = Keys::add_index(keys[i], lane * scores.kPerVector);

  // Round r finds the row's r-th key: all lanes get it, lane r keeps it, its owner advances.
  Key selected = 0;
  float largest = 0.0f;
  DescendingSum terms;
#pragma unroll kUnrolled
  for (int round = 0; round < kTopkSoftmaxMaxK; ++round) {
    if (round >= args.k) break;
    const Key best = warp_max_key(keys[0]);
    const bool mine = keys[0] == best;
#pragma unroll
    for (int i = 0; i + 1 < kPerLane; ++i) keys[i] = mine ? keys[i + 1] : keys[i];
    keys[kPerLane - 1] = mine ? 0 : keys[kPerLane - 1];
    if (round == 0) largest = Keys::score(best);
    terms.add(exp_below(Keys::score(best), largest));
    selected = lane == round ? best : selected;
  }

  float sum = terms.total();
  if (args.all_scores) sum = lanes_reduce<32>(exp_sum(scores, largest), Sum());
  if (lane < args.k) {
    const float term = exp_below(Keys::score(selected), largest);
    const float weight = quotient(term, sum, reciprocal(sum));
    store_result(args, row * args.k + lane, weight, Keys::index(selected));
  }
  return Keys::index(selected);
}

// For float32, with keys that lack the scores' last bits, in half the instructions. A row in which
// these matter is repeated with exact keys.
template <int kIndexBits, int kPerLane, int kUnrolled>
__device__ __forceinline__ int finish_row_by_rounded_rounds(const TopkSoftmaxArgs& args,
                                                            int64_t row) {
  using Keys = RoundedKeysOfFloat32<kIndexBits>;
  constexpr int kVectors = kPerLane > 4 ? kPerLane / 4 : 1;
  const int lane = threadIdx.x % 32;
  const RowOfScores data = row_of(args, row);
  LaneScores<Keys, 32, kVectors, kPerLane / kVectors> scores;
  scores.load(data, lane);
  uint32_t keys[kPerLane];
  scores.keys_from(keys, 0);
  sort_descending(keys);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) keys[i] = Keys::add_index(keys[i], lane * scores.kPerVector);
  uint32_t selected = 0;
#pragma unroll kUnrolled
  for (int round = 0; round < kTopkSoftmaxMaxK; ++round) {
    if (round >= args.k) break;
    const uint32_t best = warp_max(keys[0]);
    const bool mine = keys[0] == best;
#pragma unroll
    for (int i = 0; i + 1 < kPerLane; ++i) keys[i] = mine ? keys[i + 1] : keys[i];
    keys[kPerLane - 1] = mine ? 0 : keys[kPerLane - 1];
    selected = lane == round ? best : selected;
  }

  const bool real = lane < args.k;
  const int index = real ? Keys::index(selected) : 0;
  const float score[1] = {
      real ? *reinterpret_cast<const float*>(data.data + index * data.inner_stride)
           : 0.0f};  // loaded again, from L1
  if (!is_exact<32>(scores, score, lane, args.k)) {
    return finish_row_by_rounds<KeysOfFloat32, kPerLane, 1>(args, row);
  }
  const float largest = __shfl_sync(kFullWarp, score[0], 0);
  const float term = real ? exp_below(score[0], largest) : 0.0f;
  const float sum = lanes_reduce<32>(args.all_scores ? exp_sum(scores, largest) : term, Sum());
  if (real) {
    const float weight = quotient(term, sum, reciprocal(sum));
    store_result(args, row * args.k + lane, weight, index);
  }
  return index;
}

}  // namespace tiercel

#endif  // KERNELS_ROUTING_TOPK_ROUNDS_CUH_
