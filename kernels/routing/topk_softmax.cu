// SPDX-License-Identifier: Apache-2.0
// topk_softmax: the k largest scores of each row, sorted, with softmax weights.
//
// A row of E scores (2 or 4 bytes each, E <= 512) is read once; k weights and k indices are
// written. At T = 8192, E = 128, k = 8 in bfloat16 these are 2 MiB in and 0.5 MiB out, so a launch
// is bound by latency and comparisons, not by memory. Scores become unsigned keys of score and
// index (score_keys.cuh), so each comparison is one min or max. L lanes of a warp share a row and
// read interleaved 16-byte vectors. No shared memory, no barrier.
//  - by_networks: each lane keeps the sorted top of its E / L keys by sorting networks, then
//    log2(L) shuffle merges. 8 to 32 lanes for few rows (shortest path), 1 to 4 for many (fewest
//    instructions).
//  - by_vectors, many rows of more than 128 scores: selects vectors by their largest scores in the
//    same way. The top k vectors hold the top k scores, so only these (read again, from L1) are
//    sorted.
//  - by_rounds, few rows and small k, or few rows of float32: a warp per row, k rounds of a
//    warp-wide maximum (redux.sync).
// Many rows of float32 are sorted by 32-bit keys that lack the scores' last bits. A row in which
// these could matter is detected and repeated by_rounds with exact 64-bit keys. All use
// programmatic dependent launch, so they start before the previous grid has ended.
#include <cstdint>

#include "kernels/routing/row_scores.cuh"
#include "kernels/routing/score_keys.cuh"
#include "kernels/routing/sorting.cuh"
#include "kernels/routing/topk_rounds.cuh"
#include "kernels/routing/topk_softmax_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {
namespace {

// All kLanes lanes of a row hold its top keys; lane l completes results l, l + kLanes, ...
template <typename Keys, int kLanes, int kTop, int kMaxExperts, typename Scores>
__device__ __forceinline__ void finish_row(const TopkSoftmaxArgs& args, int64_t row,
                                           const RowOfScores& data, const Scores& scores,
                                           const typename Keys::Key (&top)[kTop]) {
  constexpr int kPlaces = (kTop + kLanes - 1) / kLanes;
  const int lane = threadIdx.x % kLanes;
  int index[kPlaces];
  float score[kPlaces];
#pragma unroll
  for (int p = 0; p < kPlaces; ++p) {
    const typename Keys::Key key = pick<kLanes>(top, p, lane);
    index[p] = Keys::index(key);
    if constexpr (Keys::kExact) {
      score[p] = Keys::score(key);
    } else {  // the key lacks the last bits, so reads the score again, from L1
      const bool real = p * kLanes + lane < args.k && data.experts > 0;
      const char* address = data.data + (real ? index[p] : 0) * data.inner_stride;
      score[p] = real ? *reinterpret_cast<const float*>(address) : 0.0f;
    }
  }
  float largest;
  if constexpr (Keys::kExact) {
    largest = Keys::score(top[0]);
  } else {
    largest = __shfl_sync(kFullWarp, score[0], 0, kLanes);
  }
  float weight[kPlaces];
  float sum = 0.0f;
#pragma unroll
  for (int p = 0; p < kPlaces; ++p) {
    weight[p] = exp_below(score[p], largest);
    sum += p * kLanes + lane < args.k ? weight[p] : 0.0f;
  }
  if (args.all_scores) sum = exp_sum(scores, largest);
  constexpr bool kDescends =
      Keys::kExact && kLanes >= kTopkDescendingLanes && kTop == kTopkDescending;
  if (kDescends && args.descending) {
    DescendingSum terms;
#pragma unroll
    for (int i = 0; i < kTop; ++i) {
      const float term = __shfl_sync(kFullWarp, weight[i / kLanes], i % kLanes, kLanes);
      if (i < args.k) terms.add(term);
    }
    sum = terms.total();
  } else {
    sum = lanes_reduce<kLanes>(sum, Sum());
  }
  const float scale = reciprocal(sum);

  bool store = data.experts > 0;
  if constexpr (!Keys::kExact) {
    const bool exact = is_exact<kLanes>(scores, score, lane, args.k);  // all lanes, as it shuffles
    const bool again = store && !exact;
    // The whole warp repeats the others row by row. Rare, so the code is kept small.
    constexpr int kPerLane = (kMaxExperts < 64 ? 64 : kMaxExperts) / 32;
    for (unsigned rows = __ballot_sync(kFullWarp, again && lane == 0); rows != 0;
         rows &= rows - 1) {
      const int64_t again_row = __shfl_sync(kFullWarp, row, __ffs(rows) - 1);
      finish_row_by_rounds<KeysOfFloat32, kPerLane, 1>(args, again_row);
    }
    store = store && !again;
  }
  if (!args.early_launch) grid_dependency_launch();
#pragma unroll
  for (int p = 0; p < kPlaces; ++p) {
    const int place = p * kLanes + lane;
    if (store && place < args.k) {
      store_result(args, row * args.k + place, quotient(weight[p], sum, scale), index[p]);
    }
  }
}

// The widest kernel asks for one block per multiprocessor; without that it spills registers.
template <typename Keys, int kPerLane>
__global__ void __launch_bounds__(kTopkSoftmaxThreads, kPerLane < 16 ? 0 : 1)
    topk_softmax_by_rounds(const __grid_constant__ TopkSoftmaxArgs args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (args.early_launch) grid_dependency_launch();
  grid_dependency_wait();
  if (row < args.rows) finish_row_by_rounds<Keys, kPerLane, kTopkSoftmaxMaxK>(args, row);
}

template <typename Keys, int kLanes, int kPerLane, int kTop>
__global__ void __launch_bounds__(kTopkSoftmaxThreads)
    topk_softmax_by_networks(const __grid_constant__ TopkSoftmaxArgs args) {
  using Key = typename Keys::Key;
  constexpr int kWords = 4;
  constexpr int kPerVector = kWords * Keys::kPerWord;
  constexpr int kVectors = kPerLane / kPerVector;
  constexpr int kAtLeast = kTop > 8 ? kTop : 8;
  constexpr int kGroup = kAtLeast < kPerLane ? kAtLeast : kPerLane;  // keys sorted at a time
  constexpr int kGroupVectors = kGroup / kPerVector;

  const int lane = threadIdx.x % kLanes;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  if (args.early_launch) grid_dependency_launch();
  grid_dependency_wait();

  const RowOfScores data = row_of(args, row);
  LaneScores<Keys, kLanes, kVectors, kWords> scores;
  scores.load(data, lane);

  Key top[kTop];
#pragma unroll
  for (int v = 0; v < kVectors; v += kGroupVectors) {
    if (v > 0 && v * kLanes * kPerVector >= args.experts) break;
    Key keys[kGroup];
    scores.template keys_from<kGroup>(keys, v);
    if (v == 0) {
      select_top(top, keys);
    } else {
      Key group_top[kTop];
      select_top(group_top, keys);
      merge_top(top, group_top);
    }
  }
#pragma unroll
  for (int i = 0; i < kTop; ++i) top[i] = Keys::add_index(top[i], lane * kPerVector);
  merge_lanes<kLanes>(top);
  finish_row<Keys, kLanes, kTop, kLanes * kPerLane>(args, row, data, scores, top);
}

template <typename Keys, int kLanes, int kPerLane, int kTop>
__global__ void __launch_bounds__(kTopkSoftmaxThreads)
    topk_softmax_by_vectors(const __grid_constant__ TopkSoftmaxArgs args) {
  using Key = typename Keys::Key;
  constexpr int kWords = 4;
  constexpr int kPerVector = kWords * Keys::kPerWord;
  constexpr int kVectors = kPerLane / kPerVector;

  const int lane = threadIdx.x % kLanes;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  if (args.early_launch) grid_dependency_launch();
  grid_dependency_wait();

  const RowOfScores data = row_of(args, row);
  LaneScores<Keys, kLanes, kVectors, kWords> scores;
  scores.load(data, lane);

  // The kTop vectors with the largest maxima contain the kTop largest scores.
  Key vectors[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    vectors[v] = Keys::of_vector(scores.words[v], v * kLanes + lane);
  }
  Key top[kTop];
  select_top(top, vectors);
  merge_lanes<kLanes>(top);

  // Distributes them over the lanes, reads them again and sorts by score.
  constexpr int kMine = (kTop + kLanes - 1) / kLanes;
  Key keys[kMine * kPerVector];
#pragma unroll
  for (int m = 0; m < kMine; ++m) {
    const Key vector = pick<kLanes>(top, m, lane);
    const int first = Keys::index(vector) * kPerVector;
    uint32_t words[kWords];
    load_scores<Keys>(words, data, vector == 0 ? kTopkSoftmaxMaxExperts : first);
#pragma unroll
    for (int i = 0; i < kPerVector; i += Keys::kPerWord) {
      Keys::make(&keys[m * kPerVector + i], words[i / Keys::kPerWord], i);
    }
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) {
      Key& key = keys[m * kPerVector + i];
      key = vector == 0 ? 0 : Keys::add_index(key, first);
    }
  }
  select_top(top, keys);
  merge_lanes<kLanes>(top);
  finish_row<Keys, kLanes, kTop, kLanes * kPerLane>(args, row, data, scores, top);
}

using BFloat16Keys = KeysOf16Bit<BFloat16Format>;
using Float16Keys = KeysOf16Bit<Float16Format>;

#define TIERCEL_KERNEL(function, rounds, keys, dtype, max_rows, max_experts, top, lanes, name, \
                       ...)                                                                    \
  {DType::k##dtype,                                                                            \
   max_rows,                                                                                   \
   max_experts,                                                                                \
   top,                                                                                        \
   lanes,                                                                                      \
   rounds,                                                                                     \
   Kernel("topk_softmax_" #function "<" #dtype name ">",                                       \
          reinterpret_cast<const void*>(topk_softmax_##function<keys, __VA_ARGS__>))}
#define TIERCEL_ROUNDS(keys, dtype, max_rows, top, per_lane)                     \
  TIERCEL_KERNEL(by_rounds, true, keys, dtype, max_rows, 32 * per_lane, top, 32, \
                 ", per_lane=" #per_lane, per_lane)
#define TIERCEL_SORTED(function, keys, dtype, max_rows, max_experts, lanes, per_lane, top) \
  TIERCEL_KERNEL(function, false, keys, dtype, max_rows, max_experts, top, lanes,          \
                 ", lanes=" #lanes ", per_lane=" #per_lane ", top=" #top, lanes, per_lane, top)

#define TIERCEL_ALL_ROUNDS(keys, dtype, max_rows, top)                                          \
  TIERCEL_ROUNDS(keys, dtype, max_rows, top, 2), TIERCEL_ROUNDS(keys, dtype, max_rows, top, 4), \
      TIERCEL_ROUNDS(keys, dtype, max_rows, top, 8),                                            \
      TIERCEL_ROUNDS(keys, dtype, max_rows, top, 16)
#define TIERCEL_ALL_TOPS(function, keys, dtype, max_experts, lanes, per_lane)           \
  TIERCEL_SORTED(function, keys, dtype, kAnyRows, max_experts, lanes, per_lane, 4),     \
      TIERCEL_SORTED(function, keys, dtype, kAnyRows, max_experts, lanes, per_lane, 8), \
      TIERCEL_SORTED(function, keys, dtype, kAnyRows, max_experts, lanes, per_lane, 16)

// keys<n>: keys with an index of n bits.
#define TIERCEL_FEW_ROWS(dtype, keys)                                     \
  TIERCEL_ALL_ROUNDS(keys, dtype, kFewRows, 4),                           \
      TIERCEL_SORTED(by_networks, keys, dtype, kFewRows, 64, 8, 8, 8),    \
      TIERCEL_SORTED(by_networks, keys, dtype, kFewRows, 128, 16, 8, 8),  \
      TIERCEL_SORTED(by_networks, keys, dtype, kFewRows, 256, 32, 8, 8),  \
      TIERCEL_SORTED(by_networks, keys, dtype, kFewRows, 512, 32, 16, 8), \
      TIERCEL_ALL_ROUNDS(keys, dtype, kFewRows, 16)
#define TIERCEL_SMALL_ROWS(dtype, keys5, keys7)                           \
  TIERCEL_SORTED(by_networks, keys5, dtype, kAnyRows, 32, 1, 32, 4),      \
      TIERCEL_SORTED(by_networks, keys5, dtype, kOneWave, 32, 4, 8, 8),   \
      TIERCEL_SORTED(by_networks, keys5, dtype, kAnyRows, 32, 1, 32, 8),  \
      TIERCEL_SORTED(by_networks, keys5, dtype, kOneWave, 32, 2, 16, 16), \
      TIERCEL_SORTED(by_networks, keys5, dtype, kAnyRows, 32, 1, 32, 16), \
      TIERCEL_SORTED(by_networks, keys7, dtype, kAnyRows, 128, 4, 32, 4)
#define TIERCEL_MANY_ROWS(dtype, keys6, keys7, keys8, keys9)               \
  TIERCEL_SORTED(by_networks, keys7, dtype, kOneWave, 64, 4, 32, 8),       \
      TIERCEL_SORTED(by_networks, keys6, dtype, kAnyRows, 64, 2, 32, 8),   \
      TIERCEL_SORTED(by_networks, keys7, dtype, kAnyRows, 128, 4, 32, 8),  \
      TIERCEL_SORTED(by_networks, keys7, dtype, kAnyRows, 128, 4, 32, 16), \
      TIERCEL_ALL_TOPS(by_vectors, keys8, dtype, 256, 4, 64),              \
      TIERCEL_ALL_TOPS(by_vectors, keys9, dtype, 512, 8, 64)
#define TIERCEL_16BIT(dtype, keys)                                      \
  TIERCEL_FEW_ROWS(dtype, keys), TIERCEL_SMALL_ROWS(dtype, keys, keys), \
      TIERCEL_SORTED(by_networks, keys, dtype, 4096, 64, 8, 8, 8),      \
      TIERCEL_SORTED(by_networks, keys, dtype, 2048, 128, 16, 8, 8),    \
      TIERCEL_MANY_ROWS(dtype, keys, keys, keys, keys)

constexpr int64_t kFewRows = 1024;
constexpr int64_t kOneWave = 16384;  // one lane per row would leave the SMs half empty
constexpr int64_t kAnyRows = INT64_MAX;

// The first entry that covers a call is used: few rows before many, small k before large. The
// bounds are measured; some kernels have two entries.
const TopkSoftmaxKernel kKernels[] = {
    TIERCEL_16BIT(BFloat16, BFloat16Keys), TIERCEL_16BIT(Float16, Float16Keys),
    TIERCEL_ALL_ROUNDS(KeysOfFloat32, Float32, 2048, 16),
    TIERCEL_SMALL_ROWS(Float32, RoundedKeysOfFloat32<5>, RoundedKeysOfFloat32<7>),
    TIERCEL_MANY_ROWS(Float32, RoundedKeysOfFloat32<6>, RoundedKeysOfFloat32<7>,
                      RoundedKeysOfFloat32<8>, RoundedKeysOfFloat32<9>)};

}  // namespace

const TopkSoftmaxKernel* topk_softmax_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
