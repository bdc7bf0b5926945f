// SPDX-License-Identifier: Apache-2.0
// Routes a row by one warp: scores, groups, k rounds of selection, weights.
#ifndef KERNELS_ROUTING_TOPK_ROUTE_CUH_
#define KERNELS_ROUTING_TOPK_ROUTE_CUH_

#include <cstdint>

#include "kernels/routing/moe_align.cuh"
#include "kernels/routing/route_scores.cuh"
#include "kernels/routing/score_keys.cuh"
#include "kernels/routing/sorting.cuh"
#include "kernels/routing/topk_route_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {

__device__ __forceinline__ float score_of_order(uint32_t ordered) {
  return __uint_as_float(ordered ^ (ordered & 0x80000000u ? 0x80000000u : 0xffffffffu));
}

// The lane's `count` scores from `first` on.
template <typename Keys, int kPerLane>
__device__ __forceinline__ void load_lane(float (&x)[kPerLane], const TopkRouteArgs& args,
                                          const char* row, int first, int count) {
  constexpr int kWords = kPerLane / Keys::kPerWord;
  uint32_t words[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = Keys::kPad;
  if (args.vector_bytes == 16) {
#pragma unroll
    for (int w = 0; w < kWords; w += 4) {
      uint32_t vector[4] = {Keys::kPad, Keys::kPad, Keys::kPad, Keys::kPad};
      const int place = w * Keys::kPerWord;
      if (place < count) load_vector(vector, row + (first + place) * Keys::kBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) words[w + i] = vector[i];
    }
  } else if (args.vector_bytes >= 4) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int place = w * Keys::kPerWord;
      if (place < count) {
        words[w] = *reinterpret_cast<const uint32_t*>(row + (first + place) * Keys::kBytes);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i < count) {
        const char* address = row + (first + i) * args.inner_stride;
        uint32_t& word = words[i / Keys::kPerWord];
        if constexpr (Keys::kBytes == 4) {
          word = *reinterpret_cast<const uint32_t*>(address);
        } else {
          const uint32_t bits = *reinterpret_cast<const uint16_t*>(address);
          word = __byte_perm(word, bits, i % 2 ? 0x5410 : 0x3254);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    x[i] = Keys::raw_score(words[i / Keys::kPerWord], i % Keys::kPerWord);
  }
}

inline constexpr int kRouteChunk = 8;   // experts of a lane that are loaded at a time
inline constexpr int kRouteGroups = 8;  // whose shuffles are in flight at a time

template <int kCount>
__device__ __forceinline__ void load_bias(float (&bias)[kCount], const TopkRouteArgs& args,
                                          int first, int count) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    if (args.bias_vectors) {
      float4 some = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (i < count) some = *reinterpret_cast<const float4*>(args.bias + first + i);
      bias[i] = some.x, bias[i + 1] = some.y, bias[i + 2] = some.z, bias[i + 3] = some.w;
    } else {
#pragma unroll
      for (int j = i; j < i + 4; ++j) bias[j] = j < count ? args.bias[first + j] : 0.0f;
    }
  }
}

// A lane's scores: in registers, or where these do not suffice, loaded again for each pass.
template <typename Keys, int kPerLane>
struct RouteScores {
  static constexpr bool kHeld = kPerLane <= 16;

  const TopkRouteArgs& args;
  const char* row;
  int first, count;
  float held[kHeld ? kPerLane : 1];

  __device__ __forceinline__ void load() {
    if constexpr (kHeld) load_lane<Keys>(held, args, row, first, count);
  }
  // Calls visit(chunk, scores of kRouteChunk experts).
  template <typename Visit>
  __device__ __forceinline__ void each_chunk(Visit visit) const {
#pragma unroll
    for (int chunk = 0; chunk < kPerLane; chunk += kRouteChunk) {
      float x[kRouteChunk];
      if constexpr (kHeld) {
#pragma unroll
        for (int i = 0; i < kRouteChunk; ++i) x[i] = held[chunk + i];
      } else {
        load_lane<Keys>(x, args, row, first + chunk, count - chunk);
      }
      visit(chunk, x);
    }
  }
};

// Clears the experts of a lane whose group is not among the best. A group's score is its largest
// one or, with a bias, the sum of its two largest ones.
template <int kPerLane>
__device__ __forceinline__ void drop_groups(uint32_t (&ordered)[kPerLane],
                                            const TopkRouteArgs& args, int group) {
  uint32_t largest = 0, second = 0;
#pragma unroll
  for (int chunk = 0; chunk < kPerLane; chunk += kRouteChunk) {
    // A tournament: its chain is a third of that of one comparison after the other.
    uint32_t high[kRouteChunk], low[kRouteChunk];
#pragma unroll
    for (int i = 0; i < kRouteChunk; ++i) high[i] = ordered[chunk + i], low[i] = 0;
#pragma unroll
    for (int half = kRouteChunk / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) {
        low[i] = max(max(low[i], low[i + half]), min(high[i], high[i + half]));
        high[i] = max(high[i], high[i + half]);
      }
    }
    second = max(max(second, low[0]), min(largest, high[0]));
    largest = max(largest, high[0]);
  }
  for (int offset = 1; offset < args.lanes_per_group; offset *= 2) {
    const uint32_t other = __shfl_xor_sync(kFullWarp, largest, offset);
    const uint32_t behind = __shfl_xor_sync(kFullWarp, second, offset);
    second = max(max(second, behind), min(largest, other));
    largest = max(largest, other);
  }
  uint32_t score = largest;
  if (args.bias != nullptr && second != 0) {
    score = order_float(__fadd_rn(score_of_order(largest), score_of_order(second)));
  }
  int better = 0;
  for (int begin = 0; begin < args.groups; begin += kRouteGroups) {
    uint32_t others[kRouteGroups];
#pragma unroll
    for (int i = 0; i < kRouteGroups; ++i) {
      others[i] = __shfl_sync(kFullWarp, score, (begin + i) * args.lanes_per_group);
    }
#pragma unroll
    for (int i = 0; i < kRouteGroups; ++i) {
      const int g = begin + i;
      const bool ahead = others[i] > score || (others[i] == score && g < group);
      better += g < args.groups && ahead ? 1 : 0;
    }
  }
  if (better >= args.kept_groups) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) ordered[i] = 0;
  }
}

// The k rounds over exact keys. Lane r gets the place of round r's expert, the lane * kPerLane +
// its slot, the others 0. Lanes hold neighbouring experts, in order, so that of equal ones the
// first lane's first is the first.
template <int kPerLane>
__device__ __forceinline__ int select_exactly(uint32_t (&ordered)[kPerLane], int k) {
  const int lane = threadIdx.x % 32;
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) most = max(most, ordered[i]);
  int chosen = 0;
#pragma unroll 1
  for (int round = 0; round < k; ++round) {
    const uint32_t best = warp_max(most);
    const int owner = __ffs(__ballot_sync(kFullWarp, most == best)) - 1;
    int slot = 0;
    if (lane == owner) {
#pragma unroll
      for (int i = kPerLane - 1; i >= 0; --i) slot = ordered[i] == best ? i : slot;
      most = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        ordered[i] = i == slot ? 0 : ordered[i];
        most = max(most, ordered[i]);
      }
    }
    const int place = __shfl_sync(kFullWarp, lane * kPerLane + slot, owner);
    chosen = lane == round ? place : chosen;
  }
  return chosen;
}

// Rounds over keys that each lane sorts first, so that a round is a maximum over the warp and
// the owner's step to its next key. The slot's complement replaces the lowest bits of a key: where
// these could matter, because keys agree in all others, `known` is false. 16-bit scores as such
// leave room for the whole place, and are always known.
template <int kPerLane>
__device__ __forceinline__ int select_sorted(const uint32_t (&ordered)[kPerLane], int k,
                                             bool short_scores, bool& known) {
  constexpr uint32_t kSlots = kPerLane - 1;
  const int lane = threadIdx.x % 32;
  constexpr uint32_t kSpare = 0x1fff;  // bits that 16-bit scores lack as float32
  const uint32_t kept = short_scores ? ~kSpare : ~kSlots;
  const uint32_t place = short_scores ? kSpare - lane * kPerLane : kSlots;
  const uint32_t compared = short_scores ? 0xffffffffu : ~kSlots;
  uint32_t keys[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    keys[i] = ordered[i] != 0 ? (ordered[i] & kept) | (place - i) : 0;
  }
  sort_descending(keys);

  uint32_t previous = 0, chosen = 0;
  unsigned owners = 0;
  known = true;
#pragma unroll 2
  for (int round = 0; round < kTopkRouteMaxColumns; ++round) {
    if (round >= k) break;
    const uint32_t best = warp_max(keys[0]);
    const bool mine = keys[0] == best;
    const unsigned having = __ballot_sync(kFullWarp, mine);
#pragma unroll
    for (int i = 0; i + 1 < kPerLane; ++i) keys[i] = mine ? keys[i + 1] : keys[i];
    keys[kPerLane - 1] = mine ? 0 : keys[kPerLane - 1];
    known = known && ((best ^ previous) & compared) != 0 && (having & (having - 1)) == 0;
    chosen = lane == round ? best : chosen;
    owners = lane == round ? having : owners;
    previous = best;
  }
  known = known && ((warp_max(keys[0]) ^ previous) & compared) != 0;
  return owners != 0 ? (__ffs(owners) - 1) * kPerLane + (~chosen & kSlots) : 0;
}

// A warp's scores without bias, from which those of the chosen become weights.
template <int kPerLane>
struct ScoreMemory {
  static constexpr int kSlots = kPerLane <= 16 ? kPerLane : 1;  // more are computed again

  float scores[kSlots][32];

  __device__ __forceinline__ float& at(int slot, int lane) { return scores[slot % kSlots][lane]; }
};

// Processes one row by a warp, from load to store. Lane l < k + shared gets the l-th index.
template <typename Keys, int kPerLane>
__device__ __forceinline__ int finish_row_routed(const TopkRouteArgs& args, int64_t row,
                                                 ScoreMemory<kPerLane>& memory) {
  const int lane = threadIdx.x % 32;
  const int group = lane >> args.lane_shift;
  const int begin = (lane & (args.lanes_per_group - 1)) * args.per_lane;
  const int first = group * args.group + begin;
  const int count = group < args.groups ? min(args.per_lane, args.group - begin) : 0;
  const char* data = static_cast<const char*>(args.scores) + row * args.row_stride;

  using Scores = RouteScores<Keys, kPerLane>;
  Scores scores{args, data, first, count, {}};
  float biases[Scores::kHeld ? kPerLane : kRouteChunk];
  // First, so that both loads are in flight before either is used.
  if (Scores::kHeld && args.bias != nullptr) load_bias(biases, args, first, count);
  scores.load();

  float largest = 0.0f, sum = 0.0f;
  const bool softmax = args.scoring == TopkScoring::kSoftmax;
  if (softmax && (args.all_scores || args.bias != nullptr)) {
    uint32_t most = 0;
    scores.each_chunk([&](int chunk, const float (&x)[kRouteChunk]) {
#pragma unroll
      for (int i = 0; i < kRouteChunk; ++i) {
        most = max(most, chunk + i < count ? order_float(x[i]) : 0);
      }
    });
    largest = score_of_order(warp_max(most));
    // Adds whole numbers, so that the order of additions does not matter.
    uint64_t all = 0;
    scores.each_chunk([&](int chunk, const float (&x)[kRouteChunk]) {
#pragma unroll
      for (int i = 0; i < kRouteChunk; ++i) {
        const float term = exp_of_negative(__fsub_rn(x[i], largest));
        all += chunk + i < count ? __float2ull_rn(__fmul_rn(term, 0x1p40f)) : 0;
      }
    });
    sum = __fmul_rn(__ull2float_rn(lanes_reduce<32>(all, Sum())), 0x1p-40f);
    if (!(fabsf(largest) < __builtin_huge_valf())) sum = __int_as_float(0x7fffffff);
  }

  uint32_t ordered[kPerLane];
  scores.each_chunk([&](int chunk, const float (&x)[kRouteChunk]) {
    float by[kRouteChunk];
#pragma unroll
    for (int i = 0; i < kRouteChunk; ++i) by[i] = x[i];
    if (args.bias != nullptr) {
      if constexpr (!Scores::kHeld) load_bias(biases, args, first + chunk, count - chunk);
      constexpr int kTogether = kPerLane == 8 ? kRouteChunk : 4;  // registers
#pragma unroll
      for (int begin = 0; begin < kRouteChunk; begin += kTogether) {
        activate(*reinterpret_cast<float (*)[kTogether]>(by + begin), args.scoring, largest, sum);
      }
      if constexpr (Scores::kHeld) {
#pragma unroll
        for (int i = 0; i < kRouteChunk; ++i) memory.at(chunk + i, lane) = by[i];
      }
#pragma unroll
      for (int i = 0; i < kRouteChunk; ++i) {
        by[i] = __fadd_rn(by[i], biases[Scores::kHeld ? chunk + i : i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kRouteChunk; ++i) {
      ordered[chunk + i] = chunk + i < count ? order_float(by[i]) : 0;
    }
  });
  if (args.kept_groups < args.groups) drop_groups(ordered, args, group);

  int chosen_place;
  bool known = false;
  if constexpr (Scores::kHeld) {
    const bool short_scores = Keys::kBytes == 2 && args.bias == nullptr;
    chosen_place = select_sorted(ordered, args.k, short_scores, known);
  }
  if (!known) chosen_place = select_exactly(ordered, args.k);
  const int owner = chosen_place / kPerLane, slot = chosen_place % kPerLane;
  int chosen = __shfl_sync(kFullWarp, first, owner) + slot;

  __syncwarp();  // scores in memory are visible
  const bool real = lane < args.k;
  const bool scored = Scores::kHeld && !softmax && args.bias != nullptr;
  float score = -__builtin_huge_valf();
  if (real && !scored) {  // read again, from L1
    const char* address = data + chosen * args.inner_stride;
    const uint32_t bits = Keys::kBytes == 4 ? *reinterpret_cast<const uint32_t*>(address)
                                            : *reinterpret_cast<const uint16_t*>(address);
    score = Keys::raw_score(bits, 0);
  }
  float weight;
  if (softmax) {
    if (!args.all_scores) largest = score_of_order(warp_max(real ? order_float(score) : 0));
    weight = exp_of_negative(__fsub_rn(score, largest));
    if (!args.all_scores) sum = lanes_reduce<32>(real ? weight : 0.0f, Sum());
    weight = divided(weight, sum);
  } else {
    weight = scored ? memory.at(slot, owner) : activated(score, args.scoring);
    if (args.renormalize) {
      // The summand, as in DeepSeek's models, gives rows of zeros the weights 0.
      const float own = real ? weight : 0.0f;  // of 0 from lane 8 on, mostly
      sum = args.k <= 8 ? lanes_reduce<8>(own, Sum()) : lanes_reduce<32>(own, Sum());
      sum = __fadd_rn(sum, 1e-20f);
      weight = sum == __builtin_huge_valf() ? __fmul_rn(weight, 0.0f) : divided(weight, sum);
    }
  }
  weight = __fmul_rn(weight, args.scaling);
  const int columns = args.k + args.shared;
  if (!real) {
    chosen = args.experts + lane - args.k;
    weight = 1.0f;
  }
  if (!args.early_launch) grid_dependency_launch();
  if (lane < columns) {
    const int64_t place = row * columns + lane;
    args.weights[place] = weight;
    if (args.int64_indices) {
      static_cast<int64_t*>(args.indices)[place] = chosen;
    } else {
      static_cast<int32_t*>(args.indices)[place] = chosen;
    }
  }
  return chosen;
}

// The first warps route a row each by finish_row(row); all take part in the alignment, with a
// thread per expert.
template <typename FinishRow>
__device__ __forceinline__ void route_and_align(const TopkRouteArgs& topk,
                                                const MoeAlignArgs& align, FinishRow finish_row) {
  extern __shared__ uint32_t words[];
  cluster_arrive_relaxed();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const AlignShared shared = cut_shared(words, align.experts, kTopkAlignRows, cluster_blocks());
  if (warp < kTopkAlignRows) clear_counts(shared, align.experts);
  grid_dependency_wait();
  grid_dependency_launch();

  fill_outputs(align, cluster_rank(), cluster_blocks());
  const int columns = topk.k + topk.shared;
  const uint32_t first_row = cluster_rank() * kTopkAlignRows;
  const int64_t row = first_row + warp;
  if (warp < kTopkAlignRows && row < topk.rows) {
    const int index = finish_row(row);
    if (lane < columns) shared.sorted[warp * columns + lane] = index;
  }
  __syncthreads();
  const uint32_t first_id = first_row * columns;
  const uint32_t ids = first_id < align.numel ? min(align.span, align.numel - first_id) : 0;
  uint32_t expert[1] = {static_cast<uint32_t>(align.experts)};
  if (threadIdx.x < ids) expert[0] = shared.sorted[threadIdx.x];
  to_local_experts(align, expert);
  align_block<10, true>(align, shared, expert, first_id, (ids + 31) / 32);
}

}  // namespace tiercel

#endif  // KERNELS_ROUTING_TOPK_ROUTE_CUH_
