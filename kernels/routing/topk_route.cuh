// SPDX-License-Identifier: Apache-2.0
// Routes a row by one warp: scores, groups, k rounds of selection, weights.
#ifndef KERNELS_ROUTING_TOPK_ROUTE_CUH_
#define KERNELS_ROUTING_TOPK_ROUTE_CUH_

#include <cstdint>

#include "kernels/routing/moe_align.cuh"
#include "kernels/routing/score_keys.cuh"
#include "kernels/routing/topk_route_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {

// The functions below are sequences of IEEE operations without contraction, which the reference
// repeats: so a bias gives the same choice on every device.

// a / b for a = 0 or a >= 2^-102 and b from 2^-67 to 2^67, correctly rounded: the operator's own
// sequence without its branch for other numbers, which costs registers.
__device__ __forceinline__ float divided(float a, float b) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
  y = fmaf(fmaf(-b, y, 1.0f), y, y);
  float q = __fmul_rn(a, y);
  q = fmaf(fmaf(-b, q, a), y, q);
  return fmaf(fmaf(-b, q, a), y, q);
}

// The root of a number in the same range, likewise.
__device__ __forceinline__ float root(float a) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(a));
  const float s = __fmul_rn(a, y);
  const float result = fmaf(fmaf(-s, s, a), __fmul_rn(y, 0.5f), s);
  return a == 0.0f || a == __builtin_huge_valf() ? a : result;
}

// exp(x) for x <= 0, to 2 units in the last place; 0 below -69.
__device__ __forceinline__ float exp_of_negative(float x) {
  const float n = rintf(__fmul_rn(x, 1.44269504f));
  float r = __fsub_rn(x, __fmul_rn(n, 0.693359375f));
  r = __fsub_rn(r, __fmul_rn(n, -2.12194440e-4f));
  float p = 1.9875691500e-4f;
  p = __fadd_rn(__fmul_rn(p, r), 1.3981999507e-3f);
  p = __fadd_rn(__fmul_rn(p, r), 8.3334519073e-3f);
  p = __fadd_rn(__fmul_rn(p, r), 4.1665795894e-2f);
  p = __fadd_rn(__fmul_rn(p, r), 1.6666665459e-1f);
  p = __fadd_rn(__fmul_rn(p, r), 5.0000001201e-1f);
  p = __fadd_rn(__fadd_rn(__fmul_rn(__fmul_rn(p, r), r), r), 1.0f);
  const float result = __fmul_rn(p, __int_as_float((__float2int_rn(n) + 127) << 23));
  return x < -69.0f ? 0.0f : result;
}

// log(1 + e) for e from 0 to 1.
__device__ __forceinline__ float log_of_one_and(float e) {
  const float z = divided(e, __fadd_rn(e, 2.0f));
  const float s = __fmul_rn(z, z);
  float p = 1.0f / 15;
  p = __fadd_rn(__fmul_rn(p, s), 1.0f / 13);
  p = __fadd_rn(__fmul_rn(p, s), 1.0f / 11);
  p = __fadd_rn(__fmul_rn(p, s), 1.0f / 9);
  p = __fadd_rn(__fmul_rn(p, s), 1.0f / 7);
  p = __fadd_rn(__fmul_rn(p, s), 1.0f / 5);
  p = __fadd_rn(__fmul_rn(p, s), 1.0f / 3);
  const float twice = __fadd_rn(z, z);
  return __fadd_rn(__fmul_rn(__fmul_rn(twice, s), p), twice);
}

// sigmoid(x), or sqrt(softplus(x)).
__device__ __forceinline__ float activated(float x, TopkScoring scoring) {
  const float e = exp_of_negative(-fabsf(x));
  if (scoring == TopkScoring::kSigmoid) return divided(x < 0.0f ? e : 1.0f, __fadd_rn(e, 1.0f));
  return root(__fadd_rn(x < 0.0f ? 0.0f : x, log_of_one_and(e)));
}

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

inline constexpr int kRouteChunk = 8;  // experts of a lane that are loaded at a time

__device__ __forceinline__ void load_bias(float (&bias)[kRouteChunk], const TopkRouteArgs& args,
                                          int first, int count) {
#pragma unroll
  for (int i = 0; i < kRouteChunk; i += 4) {
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
  for (int i = 0; i < kPerLane; ++i) {
    second = max(second, min(largest, ordered[i]));
    largest = max(largest, ordered[i]);
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
  for (int g = 0; g < args.groups; ++g) {
    const uint32_t other = __shfl_sync(kFullWarp, score, g * args.lanes_per_group);
    better += other > score || (other == score && g < group) ? 1 : 0;
  }
  if (better >= args.kept_groups) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) ordered[i] = 0;
  }
}

// Processes one row by a warp, from load to store. Lane l < k + shared gets the l-th index. Lanes
// hold neighbouring experts, in order, so that of equal ones the first lane's first is the first.
template <typename Keys, int kPerLane>
__device__ __forceinline__ int finish_row_routed(const TopkRouteArgs& args, int64_t row) {
  const int lane = threadIdx.x % 32;
  const int group = lane / args.lanes_per_group;
  const int begin = lane % args.lanes_per_group * args.per_lane;
  const int first = group * args.group + begin;
  const int count = group < args.groups ? min(args.per_lane, args.group - begin) : 0;
  const char* data = static_cast<const char*>(args.scores) + row * args.row_stride;

  RouteScores<Keys, kPerLane> scores{args, data, first, count, {}};
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
    float bias[kRouteChunk];
    if (args.bias != nullptr) load_bias(bias, args, first + chunk, count - chunk);
#pragma unroll
    for (int i = 0; i < kRouteChunk; ++i) {
      float by = x[i];
      if (args.bias != nullptr) {
        const float score = softmax ? divided(exp_of_negative(__fsub_rn(by, largest)), sum)
                                    : activated(by, args.scoring);
        by = __fadd_rn(score, bias[i]);
      }
      ordered[chunk + i] = chunk + i < count ? order_float(by) : 0;
    }
  });
  if (args.kept_groups < args.groups) drop_groups(ordered, args, group);

  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) most = max(most, ordered[i]);
  int chosen = 0;
#pragma unroll 1
  for (int round = 0; round < args.k; ++round) {
    const uint32_t best = warp_max(most);
    const int owner = __ffs(__ballot_sync(kFullWarp, most == best)) - 1;
    int index = 0;
    if (lane == owner) {
      int slot = 0;
#pragma unroll
      for (int i = kPerLane - 1; i >= 0; --i) slot = ordered[i] == best ? i : slot;
      most = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        ordered[i] = i == slot ? 0 : ordered[i];
        most = max(most, ordered[i]);
      }
      index = first + slot;
    }
    index = __shfl_sync(kFullWarp, index, owner);
    chosen = lane == round ? index : chosen;
  }

  const bool real = lane < args.k;
  float score = -__builtin_huge_valf();
  if (real) {  // read again, from L1
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
    weight = activated(score, args.scoring);
    if (args.renormalize) {
      // The summand, as in DeepSeek's models, gives rows of zeros the weights 0.
      sum = __fadd_rn(lanes_reduce<32>(real ? weight : 0.0f, Sum()), 1e-20f);
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
