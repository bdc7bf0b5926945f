// SPDX-License-Identifier: Apache-2.0
// Draws a token from each row of logits: penalties, a mask, temperature, min-p, top-k, top-p.
//
//   d_i = max(x) - x_i                 float32; tokens are compared by it
//   w_i = 2^(-d_i log2(e) / T)         the weight of a token
//   min-p keeps w_i >= min_p; top-k the tokens with d up to the k-th smallest; top-p, of these, the
//   tokens with d up to the least one at which they have p of the kept weight. Ties are all kept.
//   The token: the first, by index, at which the kept weights sum up to more than u of them all.
//
// A row is read once. A cluster of 1 to 8 blocks holds it in shared memory, as logits or, with
// penalties, as float32:
//
//   1. Each warp loads segments of 1024 logits, applies penalties and mask, stores them to shared
//      memory, and finds each segment's maximum and, without filters, its sum of weights. All
//      blocks receive all segments' pairs.
//   2. With filters: the k-th largest of the segments' maxima bounds the k-th largest logit from
//      below. If at most 512 tokens are above the bounds, they go to one block, whose threads
//      compare all with all, which gives both thresholds and the token.
//   3. Otherwise, with top-k or top-p, the threshold is found by histograms of d, of 512 bins each,
//      that the cluster adds up: of d in fixed point, then in the bin that the threshold is in, and
//      so on until that bin has one token or one value. Then each segment's sum of kept weights.
//   4. One warp finds the segment in which the sum is exceeded, and in it the token.
//
// With filters, weights are whole numbers in units of 2^-31, so that their sums do not depend on
// the order of additions.
//
// Nothing depends on how many blocks share a row, so a row's token does not depend on the batch.
#include <cstdint>
#include <type_traits>

#include "kernels/sampling/philox.cuh"
#include "kernels/sampling/sample_kernels.h"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {
namespace {

constexpr int kWarps = kSampleThreads / 32;
constexpr int kVectorBytes = 16;
constexpr float kInfinity = __builtin_huge_valf();
// Weights as whole numbers: of filtered rows, and of one segment of another row.
constexpr float kUnit = 2147483648.0f;         // 2^31
constexpr float kFineUnit = 1099511627776.0f;  // 2^40
constexpr int kFixedBits = 23;                 // of d in fixed point
constexpr int kBinBits = 9;
static_assert(1 << kBinBits == kSampleBins);
// Rows with as few candidates need no histograms.
constexpr int kFew = 512;
// A guess where top-p ends: one in so many of a thread's vectors, and the share it may be off by.
constexpr int kSampled = 16;
constexpr float kMargin = 0.03f;
// Of a row with few segments, each has the maxima of that many groups of lanes.
constexpr int kGroups = 4;
constexpr int kGroupedSegments = 64;

template <typename T>
__device__ __forceinline__ T parameter(const SampleParameter<T>& parameter, int64_t row) {
  return parameter.of_rows == nullptr ? parameter.of_all : parameter.of_rows[row];
}

// A NaN wins.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// Of max_or_nan's results: NaN is the largest of the integers too.
__device__ __forceinline__ float warp_largest(float value) {
  const int bits = __float_as_int(value);
  const int most = __reduce_max_sync(kFullWarp, bits ^ (bits >> 31 & 0x7fffffff));
  return __int_as_float(most ^ (most >> 31 & 0x7fffffff));
}

__device__ __forceinline__ uint64_t warp_sum(uint64_t value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

// The sum of the values of this lane and of those before it.
__device__ __forceinline__ uint64_t warp_running_sum(uint64_t value) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t below = __shfl_up_sync(kFullWarp, value, offset);
    if (threadIdx.x % 32 >= offset) value += below;
  }
  return value;
}

// Reads 4 bytes of block `rank`'s shared memory, at the offset that `address` has in this block's.
__device__ __forceinline__ uint32_t load_remote(const uint32_t* address, uint32_t rank) {
  uint32_t value;
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %1, %2;"
      " ld.shared::cluster.u32 %0, [remote]; }"
      : "=r"(value)
      : "r"(shared_address(address)), "r"(rank)
      : "memory");
  return value;
}

// ceil(share * whole), at least 1; share below 1.
__device__ __forceinline__ uint64_t part_of(float share, uint64_t whole) {
  const uint64_t fixed = __float2ull_rn(fmaxf(share, 0.0f) * 18446744073709551616.0f);
  const uint64_t up = whole * fixed != 0 ? 1 : 0;
  const uint64_t part = __umul64hi(whole, fixed) + up;
  return part == 0 ? 1 : part;
}

// The tokens that are kept: those up to both.
struct Bound {
  uint32_t fixed;  // of d in fixed point
  uint32_t bits;   // of d
};

struct Candidate {
  float d;
  int column;
};

struct Shared {
  union {
    uint32_t counts[kSampleBins];
    uint32_t weights[kFew];  // of the candidates
  };
  union {
    struct {
      uint32_t low[kSampleBins];  // of the sums of weights
      uint32_t high[kSampleBins];
    };
    Candidate few[kFew];
  };
  float tops[kGroupedSegments * kGroups];  // the largest of each group of lanes' logits
  uint64_t of_warps[kWarps];
  uint4 found[kSampleBlocks];  // each block's number of candidates, and the sum of their weights
  uint64_t before, amount;     // of the bin that the target is in, and in it
  uint32_t bin, tokens;
  uint32_t candidates;  // of this block
  float bound;
};

template <typename Format>
constexpr int kPerVector = kVectorBytes / Format::kBytes;

template <typename Format>
struct Row {
  const SampleArgs& args;
  int64_t row;
  int first, last;  // segments of this block
  uint4* held;
  float2* segments;  // maximum and sum of weights of each segment of the row
  uint64_t* masses;  // of each segment
  float* sums;       // of each segment at temperature 1
  Shared& shared;
  float scale;    // log2(e) / T
  float largest;  // of the row
  float limit;    // the largest d that counts
  float origin;   // a power of two above it

  __device__ __forceinline__ void meet() const {
    if (args.blocks == 1) {
      __syncthreads();
    } else {
      cluster_arrive();
      cluster_wait();
    }
  }

  __device__ __forceinline__ float distance(float x) const {
    return x == largest ? 0.0f : largest - x;
  }
  __device__ __forceinline__ uint32_t fixed(float d) const {
    const uint32_t value = __float_as_uint(d + origin) - __float_as_uint(origin);
    return min(value, (1u << kFixedBits) - 1);
  }
  __device__ __forceinline__ uint32_t weight(float d) const {
    return __float2uint_rn(exp2_approx(-d * scale) * kUnit);
  }
  __device__ __forceinline__ bool within(float d, const Bound& bound) const {
    return d <= limit && fixed(d) <= bound.fixed && __float_as_uint(d) <= bound.bits;
  }

  // Calls f(d) for the tokens of this block whose d is up to the limit, or for one in kStep.
  template <int kStep = 1, typename Function>
  __device__ __forceinline__ void each(Function f) const {
    const int vectors = (last - first) * (kSampleSegment / kPerVector<Format>);
#pragma unroll 2
    for (int v = threadIdx.x; v < vectors; v += kSampleThreads * kStep) {
      uint32_t words[4];
      float values[kPerVector<Format>];
      load_vector(words, &held[v]);
      unpack<Format>(words, values);
#pragma unroll
      for (float x : values) {
        const float d = distance(x);
        if (d <= limit) f(d);
      }
    }
  }

  // The sum of the values of all threads of the block.
  __device__ __forceinline__ uint64_t block_sum(uint64_t value) const {
    value = warp_sum(value);
    __syncthreads();  // the last sum has been read
    if (threadIdx.x % 32 == 0) shared.of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) value += shared.of_warps[warp];
    return value;
  }

  // Sends the block's number of candidates, and the sum of its threads' values, to all blocks.
  __device__ __forceinline__ void publish(uint64_t own) const {
    own = block_sum(own);
    if (threadIdx.x < args.blocks) {
      const uint32_t rank = args.blocks > 1 ? cluster_rank() : 0;
      store_remote(reinterpret_cast<float4*>(&shared.found[rank]), threadIdx.x,
                   make_float4(__uint_as_float(shared.candidates), 0.0f,
                               __uint_as_float(static_cast<uint32_t>(own)),
                               __uint_as_float(static_cast<uint32_t>(own >> 32))));
    }
  }
  // The sum over all blocks, after meet().
  __device__ __forceinline__ uint64_t published() const {
    uint64_t all = 0;
#pragma unroll 1
    for (uint32_t rank = 0; rank < args.blocks; ++rank) {
      const uint4 found = shared.found[rank];
      all += static_cast<uint64_t>(found.w) << 32 | found.z;
    }
    return all;
  }

  // True if no two numbers of the logits' format are within these points.
  __device__ __forceinline__ bool has_one_value(uint32_t begin, uint32_t extent) const {
    const float step = origin * (1.0f / (1 << kFixedBits));
    const float near = largest - begin * step, far = near - (extent + 1) * step;
    const float least = (near > 0.0f) == (far > 0.0f) ? fminf(fabsf(near), fabsf(far)) : 0.0f;
    // Neighbours are at least this part of themselves apart.
    constexpr float kApart = Format::kPerWord == 1              ? 1.0f / (1 << 24)
                             : std::is_same_v<Format, BFloat16> ? 1.0f / (1 << 8)
                                                                : 1.0f / (1 << 11);
    return least * kApart > 2.0f * (extent + 3) * step;
  }

  // This thread's two bins, added up over the cluster, and their running sum, which begins with 0,
  // over the block's bins. All blocks get the same. Returns the sum of all bins.
  __device__ __forceinline__ uint64_t add_bins(bool by_mass, uint32_t (&tokens)[2],
                                               uint64_t (&amounts)[2], uint64_t* start) const {
    const uint32_t thread = threadIdx.x;
#pragma unroll
    for (int i = 0; i < 2; ++i) tokens[i] = 0, amounts[i] = 0;
#pragma unroll 1
    for (uint32_t rank = 0; rank < args.blocks; ++rank) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t bin = 2 * thread + i;
        const uint32_t own = load_remote(&shared.counts[bin], rank);
        tokens[i] += own;
        if (by_mass) {
          amounts[i] += static_cast<uint64_t>(load_remote(&shared.high[bin], rank)) << 32 |
                        load_remote(&shared.low[bin], rank);
        } else {
          amounts[i] += own;
        }
      }
    }
    uint64_t running = warp_running_sum(amounts[0] + amounts[1]);
    if (thread % 32 == 31) shared.of_warps[thread / 32] = running;
    __syncthreads();
    uint64_t all = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp < thread / 32) running += shared.of_warps[warp];
      all += shared.of_warps[warp];
    }
    *start = running - amounts[0] - amounts[1];
    return all;
  }

  __device__ __forceinline__ void clear_bins() const {
    for (int bin = threadIdx.x; bin < kSampleBins; bin += kSampleThreads) {
      shared.counts[bin] = shared.low[bin] = shared.high[bin] = 0;
    }
    __syncthreads();
  }

  __device__ __forceinline__ void add_to_bin(uint32_t bin, uint32_t mass) const {
    const uint32_t old = atomicAdd(&shared.low[bin], mass);
    if (old + mass < old) atomicAdd(&shared.high[bin], 1);
  }

  // Where the tokens with `share` of the weight probably end, by every 16th token: the first point
  // and the extent, in fixed point, of a window around it.
  __device__ __forceinline__ uint2 guess(float share) const {
    constexpr int kShift = kFixedBits - kBinBits;
    clear_bins();
    each<kSampled>([&](float d) { add_to_bin(fixed(d) >> kShift, weight(d)); });
    meet();
    uint32_t tokens[2];
    uint64_t amounts[2], start;
    const uint64_t all = add_bins(true, tokens, amounts, &start);
    const uint64_t from = part_of(share - kMargin, all);
    const uint64_t to = part_of(fminf(share + kMargin, 0.99999994f), all);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint64_t end = start + amounts[i];
      if (start < from && from <= end) shared.bin = 2 * threadIdx.x + i;
      if (start < to && to <= end) shared.tokens = 2 * threadIdx.x + i;
      start = end;
    }
    meet();
    return make_uint2(shared.bin << kShift, ((shared.tokens - shared.bin + 1) << kShift) - 1);
  }

  // The least bound at which the tokens within `bound` are `target` tokens, or have that weight. A
  // target of 0 is `share` of their weight. The search begins in a window of d in fixed point.
  __device__ __forceinline__ Bound select(Bound bound, bool by_mass, uint64_t target, float share,
                                          uint2 window) const {
    const uint32_t thread = threadIdx.x;
    bool in_bits = false;  // of d itself, among those with the same d in fixed point
    uint32_t same = 0, lowest = window.x, extent = window.y;
    uint32_t below = lowest;  // tokens below this point are added up, but have no bins
    int shift = max(32 - __clz(extent) - kBinBits, 0);
    uint64_t before = 0;
    for (bool begins = true;;) {
      clear_bins();
      uint64_t own = 0;
      each([&](float d) {
        const uint32_t point = fixed(d), bits = __float_as_uint(d);
        if (point > bound.fixed || bits > bound.bits || (in_bits && point != same)) return;
        if (point < below) {
          own += weight(d);
          return;
        }
        const uint32_t place = (in_bits ? bits : point) - lowest;
        if (place > extent) return;
        const uint32_t bin = place >> shift;
        atomicAdd(&shared.counts[bin], 1);
        if (by_mass) add_to_bin(bin, weight(d));
      });
      if (below > 0) publish(own);
      meet();
      if (below > 0) before = published();
      uint32_t tokens[2];
      uint64_t amounts[2], start;
      const uint64_t all = add_bins(by_mass, tokens, amounts, &start);
      if (below > 0 && (target <= before || target > before + all)) {
        // The window was wrong: the search begins again with all.
        below = lowest = 0, before = 0;
        extent = (1u << kFixedBits) - 1;
        shift = kFixedBits - kBinBits;
        meet();
        continue;
      }
      if (below == 0 && begins) {
        if (target == 0) target = part_of(share, all);
        if (all < target) {
          meet();
          return bound;
        }
      }
      below = 0;
      begins = false;
      start += before;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint64_t from = i == 0 ? start : start + amounts[0];
        if (from < target && target <= from + amounts[i]) {
          shared.bin = 2 * thread + i;
          shared.before = from;
          shared.amount = amounts[i];
          shared.tokens = tokens[i];
        }
      }
      meet();  // before the next histogram too
      const uint32_t begin = lowest + (shared.bin << shift);
      extent = (1u << shift) - 1;
      const uint32_t end = begin + extent;
      before = shared.before;
      const bool whole = shared.tokens == 1 || (!by_mass && before + shared.amount == target) ||
                         (in_bits ? shift == 0 : has_one_value(begin, extent));
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
        const float about = __uint_as_float(__float_as_uint(origin) + begin) - origin;
        const float step = origin * (1.0f / (1 << kFixedBits));
        lowest = __float_as_uint(fmaxf(about - step, 0.0f));
        extent = __float_as_uint(about + step) - lowest;
        shift = max(32 - __clz(extent) - kBinBits, 0);
      }
    }
  }

  // The segment whose `amount` makes the running sum exceed `share` of 2^64 of them all, and what
  // of it remains. For one warp.
  template <typename Amount>
  __device__ __forceinline__ int find_segment(uint64_t share, Amount amount,
                                              uint64_t* remains) const {
    const int lane = threadIdx.x % 32;
    const int each = (args.segments + 31) / 32;
    const int begin = min(lane * each, args.segments), end = min(begin + each, args.segments);
    uint64_t own = 0;
#pragma unroll 1
    for (int s = begin; s < end; ++s) own += amount(s);
    uint64_t running = warp_running_sum(own);
    const uint64_t all = __shfl_sync(kFullWarp, running, 31);
    const uint64_t target = __umul64hi(share, all);
    const unsigned beyond = __ballot_sync(kFullWarp, running > target);
    int found = 0;
    uint64_t rest = target - (running - own);
    if (lane == __ffs(beyond) - 1) {
      for (found = begin; found < end - 1; ++found) {
        const uint64_t of_segment = amount(found);
        if (of_segment > rest) break;
        rest -= of_segment;
      }
    }
    const int from = __ffs(beyond) - 1;
    *remains = __shfl_sync(kFullWarp, rest, from);
    return __shfl_sync(kFullWarp, found, from);
  }

  // The first column of the segment at which the running sum of `amount(x)` exceeds `remains`, or
  // the last with an amount. For one warp of the block that has the segment.
  template <typename Amount>
  __device__ __forceinline__ int find_column(int segment, uint64_t remains, Amount amount) const {
    const int lane = threadIdx.x % 32;
    int last_with = -1;
#pragma unroll 1
    for (int v = lane; v < kSampleSegment / kPerVector<Format>; v += 32) {
      uint32_t words[4];
      float values[kPerVector<Format>];
      load_vector(words, &held[(segment - first) * (kSampleSegment / kPerVector<Format>)+v]);
      unpack<Format>(words, values);
      uint64_t own = 0;
      int column = -1, last_own = -1;
#pragma unroll
      for (int i = 0; i < kPerVector<Format>; ++i) {
        const uint64_t of_token = amount(values[i]);
        own += of_token;
        if (of_token != 0) last_own = v * kPerVector<Format> + i;
      }
      const uint64_t running = warp_running_sum(own);
      const unsigned beyond = __ballot_sync(kFullWarp, running > remains);
      last_with = max(last_with, __reduce_max_sync(kFullWarp, last_own));
      if (beyond == 0) {
        remains -= __shfl_sync(kFullWarp, running, 31);
        continue;
      }
      uint64_t rest = remains - (running - own);
#pragma unroll
      for (int i = 0; i < kPerVector<Format>; ++i) {
        const uint64_t of_token = amount(values[i]);
        if (column < 0 && of_token > rest) column = v * kPerVector<Format> + i;
        rest -= column < 0 ? of_token : 0;
      }
      column = __shfl_sync(kFullWarp, column, __ffs(beyond) - 1);
      return segment * kSampleSegment + column;
    }
    return segment * kSampleSegment + max(last_with, 0);
  }

  // Lists the tokens up to the limit, if they are few, in the first block; returns how many of the
  // row there are, and the sum of their weights.
  __device__ __forceinline__ uint32_t gather(uint64_t* mass) const {
    if (threadIdx.x == 0) shared.candidates = 0;
    __syncthreads();
    const int vectors = (last - first) * (kSampleSegment / kPerVector<Format>);
    uint64_t own = 0;
#pragma unroll 2
    for (int v = threadIdx.x; v < vectors; v += kSampleThreads) {
      uint32_t words[4];
      float values[kPerVector<Format>];
      load_vector(words, &held[v]);
      unpack<Format>(words, values);
      float most = values[0];
#pragma unroll
      for (float x : values) most = fmaxf(most, x);
      if (!(distance(most) <= limit)) continue;
      if (*const_cast<volatile uint32_t*>(&shared.candidates) > kFew) break;
      uint32_t hits = 0;
#pragma unroll
      for (int i = 0; i < kPerVector<Format>; ++i) {
        hits |= distance(values[i]) <= limit ? 1u << i : 0;
      }
      for (; hits != 0; hits &= hits - 1) {
        const int column = first * kSampleSegment + v * kPerVector<Format> + __ffs(hits) - 1;
        const float d = distance(value_at(column));
        const uint32_t place = atomicAdd(&shared.candidates, 1);
        if (place < kFew) shared.few[place] = {d, column};
        own += weight(d);
      }
    }
    publish(own);
    meet();
    uint32_t all = 0;
#pragma unroll 1
    for (uint32_t rank = 0; rank < args.blocks; ++rank) all += min(shared.found[rank].x, kFew + 1);
    *mass = published();
    return all;
  }

  // Sends the block's candidates to the first block.
  __device__ __forceinline__ void send(uint32_t rank) const {
    uint32_t place = 0;
#pragma unroll 1
    for (uint32_t other = 0; other < rank; ++other) place += shared.found[other].x;
    for (uint32_t i = threadIdx.x; rank > 0 && i < shared.candidates; i += kSampleThreads) {
      const Candidate one = shared.few[i];
      store_remote(reinterpret_cast<float2*>(&shared.few[place + i]), 0,
                   make_float2(one.d, __int_as_float(one.column)));
    }
    meet();
  }

  // The first block chooses among `count` candidates: top_k and top_p 0 and 1 are none, and `whole`
  // is what top_p is a share of, 0 for what top_k keeps.
  __device__ __forceinline__ void choose(int count, int top_k, float top_p, uint64_t whole,
                                         uint64_t random) const {
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
      shared.weights[i] = weight(shared.few[i].d);
    }
    __syncthreads();
    uint32_t own[kOwn] = {};
    uint64_t above[kOwn] = {};
    uint64_t kept = 0;
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const int i = candidate(n);
      const float d = i < count ? shared.few[i].d : 0.0f;
      int larger = 0;
#pragma unroll 4
      for (int j = i < count ? part : count; j < count; j += share) {
        const bool is_larger = shared.few[j].d < d;
        larger += is_larger ? 1 : 0;
        above[n] += is_larger ? shared.weights[j] : 0;
      }
      for (int offset = share / 2; offset > 0; offset /= 2) {
        larger += __shfl_xor_sync(kFullWarp, larger, offset);
        above[n] += __shfl_xor_sync(kFullWarp, above[n], offset);
      }
      if (i < count) own[n] = top_k == 0 || larger < top_k ? shared.weights[i] : 0;
      kept += part == 0 ? own[n] : 0;
    }
    if (top_p < 1.0f) {
      const uint64_t target = part_of(top_p, whole == 0 ? block_sum(kept) : whole);
      kept = 0;
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        if (above[n] >= target) own[n] = 0;
        kept += part == 0 ? own[n] : 0;
      }
    }
    kept = block_sum(kept);  // all have read the weights
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      if (candidate(n) < count && part == 0) shared.weights[candidate(n)] = own[n];
    }
    __syncthreads();
    const uint64_t target = __umul64hi(random, kept);
    int column = -1;
    float d = 0.0f;
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const int i = candidate(n);
      const Candidate mine = i < count ? shared.few[i] : Candidate{0.0f, -1};
      uint64_t before = 0;
#pragma unroll 4
      for (int j = i < count ? part : count; j < count; j += share) {
        before += shared.few[j].column < mine.column ? shared.weights[j] : 0;
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
    write_token(__shfl_sync(kFullWarp, column, lane), -__shfl_sync(kFullWarp, d, lane));
  }

  __device__ __forceinline__ bool has(int segment) const {
    return segment >= first && segment < last;
  }

  __device__ __forceinline__ float value_at(int column) const {
    return load_element<Format>(reinterpret_cast<const char*>(held) +
                                (column - first * kSampleSegment) * Format::kBytes);
  }

  // For one thread.
  __device__ __forceinline__ void write(int64_t token, float logprob) const {
    if (args.wide) {
      static_cast<int64_t*>(args.tokens)[row] = token;
    } else {
      static_cast<int*>(args.tokens)[row] = static_cast<int>(token);
    }
    if (args.logprobs != nullptr) args.logprobs[row] = logprob;
  }

  // Writes the token whose logit is the largest plus `below`. For one warp.
  __device__ __forceinline__ void write_token(int column, float below) const {
    const int lane = threadIdx.x % 32;
    float logprob = 0.0f;
    if (args.logprobs != nullptr) {
      float sum = 0.0f;
#pragma unroll 1
      for (int s = lane; s < args.segments; s += 32) {
        const float m = segments[s].x;
        sum += m == -kInfinity ? 0.0f : sums[s] * exp2_approx((m - largest) * kLog2E);
      }
      logprob = below - logf(lanes_reduce<32>(sum, Sum()));
    }
    if (lane == 0) write(column, logprob);
  }
};

// Penalties and mask of a row's tokens.
struct Changes {
  const int* counts;
  const uint32_t* prompt;
  const uint32_t* allowed;
  float repetition, inverse, presence, frequency;

  template <bool kPenalties>
  __device__ __forceinline__ void load(const SampleArgs& args, int64_t row) {
    allowed = args.allowed == nullptr ? nullptr : args.allowed + row * args.words;
    if constexpr (kPenalties) {
      counts = args.counts == nullptr ? nullptr : args.counts + row * args.columns;
      prompt = args.prompt == nullptr ? nullptr : args.prompt + row * args.words;
      repetition = parameter(args.repetition, row);
      inverse = __frcp_rn(repetition);
      presence = parameter(args.presence, row);
      frequency = parameter(args.frequency, row);
    }
  }
  // The columns from `column` on, which all have their bit in one word.
  template <bool kPenalties, int kCount>
  __device__ __forceinline__ void apply(int column, int columns, float (&values)[kCount]) const {
    if (column >= columns) return;
    if constexpr (kPenalties) {
      const uint32_t in_prompt = prompt == nullptr ? 0 : prompt[column / 32] >> column % 32;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int count = counts == nullptr || column + i >= columns ? 0 : counts[column + i];
        float x = values[i];
        if (count > 0 || (in_prompt >> i & 1 && column + i < columns))
          x = __fmul_rn(x, x > 0.0f ? inverse : repetition);
        if (count > 0) {
          x = __fsub_rn(x, __fmul_rn(frequency, static_cast<float>(count)));
          x = __fsub_rn(x, presence);
        }
        values[i] = x;
      }
    }
    if (allowed != nullptr) {
      const uint32_t bits = allowed[column / 32] >> column % 32;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (!(bits >> i & 1)) values[i] = -kInfinity;
      }
    }
  }
};

template <typename Format, bool kPenalties>
constexpr int kBlocksPerSm = kPenalties || Format::kBytes == 4 ? 2 : 4;

template <typename Format, bool kPenalties>
__global__ void __launch_bounds__(kSampleThreads, (kBlocksPerSm<Format, kPenalties>))
    sample(const __grid_constant__ SampleArgs args) {
  using Held = std::conditional_t<kPenalties, Float32, Format>;
  constexpr int kColumns = kPerVector<Format>;  // of a vector
  constexpr int kVectors = kSampleSegment / 32 / kColumns;
  // With penalties there are no registers for the next segment while one is added up.
  constexpr bool kAhead = !kPenalties;
  extern __shared__ uint4 memory[];
  __shared__ Shared shared;
  if (args.blocks > 1) cluster_arrive_relaxed();
  grid_dependency_wait();
  grid_dependency_launch();

  const uint32_t rank = args.blocks > 1 ? cluster_rank() : 0;
  const int64_t place = blockIdx.x / args.blocks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = min(static_cast<int>(rank) * args.segments_per_block, args.segments);
  const int last = min(first + args.segments_per_block, args.segments);
  char* tables =
      reinterpret_cast<char*>(memory) + args.segments_per_block * kSampleSegment * Held::kBytes;
  Row<Held> row{args,
                place,
                first,
                last,
                memory,
                reinterpret_cast<float2*>(tables),
                reinterpret_cast<uint64_t*>(tables) + args.segments,
                reinterpret_cast<float*>(tables) + 4 * args.segments,
                shared,
                0.0f,
                0.0f,
                0.0f,
                0.0f};

  const float temperature = parameter(args.temperature, place);
  const int top_k = parameter(args.top_k, place);
  const float top_p = parameter(args.top_p, place);
  const float min_p = parameter(args.min_p, place);
  const bool greedy = !(temperature > 0.0f);
  const bool by_count = top_k > 0 && top_k < args.columns;
  const bool by_mass = top_p < 1.0f;
  bool filters = by_count || by_mass || min_p > 0.0f;
  // Then top-p is a share of all tokens' weights.
  const bool of_all = by_mass && !by_count && !(min_p > 0.0f);
  const bool sums = !greedy && (!filters || of_all);
  const bool grouped = args.segments <= kGroupedSegments;
  row.scale = fminf(fmaxf(kLog2E / temperature, 1e-30f), 1e30f);
  Changes changes;
  changes.load<kPenalties>(args, place);
  const bool changed = kPenalties || args.allowed != nullptr;

  const char* logits = args.logits + place * args.stride;
  const bool aligned = reinterpret_cast<uintptr_t>(logits) % kVectorBytes == 0;
  const auto load = [&](uint32_t (&words)[kVectors][4], int segment) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int column = segment * kSampleSegment + (i * 32 + lane) * kColumns;
      const char* at = logits + static_cast<int64_t>(column) * Format::kBytes;
      if (aligned && column + kColumns <= args.columns) {
        load_stream(words[i], at);
        continue;
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) words[i][w] = 0;
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        const uint32_t bits = column + k < args.columns
                                  ? reinterpret_cast<const typename Format::Storage*>(at)[k]
                                  : Format::to_bits(-kInfinity);
        words[i][k / Format::kPerWord] |= bits << k % Format::kPerWord * (8 * Format::kBytes);
      }
    }
  };

  uint32_t words[kVectors][4];
  if (first + warp < last) load(words, first + warp);
  if (args.blocks > 1) cluster_wait();  // the other blocks run
#pragma unroll 1
  for (int segment = first + warp; segment < last; segment += kWarps) {
    float most = -kInfinity;
    float values[kVectors][kColumns];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      unpack<Format>(words[i], values[i]);
      const int inside = (i * 32 + lane) * kColumns;
      auto* to = reinterpret_cast<char*>(memory) +
                 ((segment - first) * kSampleSegment + inside) * Held::kBytes;
      if (changed) {
        changes.apply<kPenalties>(segment * kSampleSegment + inside, args.columns, values[i]);
        constexpr int kHeld = kPerVector<Held>;
#pragma unroll
        for (int part = 0; part < kColumns / kHeld; ++part) {
          float some[kHeld];
#pragma unroll
          for (int k = 0; k < kHeld; ++k) some[k] = values[i][part * kHeld + k];
          uint32_t packed[4];
          pack<Held>(some, packed);
          store_vector(to + part * kVectorBytes, packed);
        }
      } else {
        store_vector(to, words[i]);
      }
#pragma unroll
      for (float x : values[i]) most = max_or_nan(most, x);
    }
    if (kAhead && segment + kWarps < last) load(words, segment + kWarps);
    if (grouped && filters) {
      float group = most;
#pragma unroll
      for (int offset = 32 / kGroups / 2; offset > 0; offset /= 2) {
        group = fmaxf(group, __shfl_xor_sync(kFullWarp, group, offset));
      }
      float* top = &shared.tops[segment * kGroups + lane / (32 / kGroups)];
      if (lane % (32 / kGroups) < args.blocks) store_remote(top, lane % (32 / kGroups), group);
    }
    most = warp_largest(most);
    const float base = most == -kInfinity ? 0.0f : most;
    float sum = 0.0f, plain = 0.0f;
    if (sums) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (float x : values[i]) sum += exp2_approx((x - base) * row.scale);
      }
      sum = lanes_reduce<32>(sum, Sum());
    }
    if (args.logprobs != nullptr) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (float x : values[i]) plain += exp2_approx((x - base) * kLog2E);
      }
      plain = lanes_reduce<32>(plain, Sum());
    }
    if (lane < args.blocks) {
      store_remote(&row.segments[segment], lane, make_float2(most, sum));
      if (args.logprobs != nullptr) store_remote(&row.sums[segment], lane, plain);
    }
    if (!kAhead && segment + kWarps < last) load(words, segment + kWarps);
  }
  row.meet();

  float largest = -kInfinity;
#pragma unroll 1
  for (int s = lane; s < args.segments; s += 32) largest = max_or_nan(largest, row.segments[s].x);
  row.largest = largest = warp_largest(largest);
  if (largest != largest || largest == -kInfinity) {
    if (rank == 0 && threadIdx.x == 0) row.write(-1, __int_as_float(0x7fc00000));
    return;
  }

  if (greedy) {
    if (warp != 0) return;
    int found = args.segments;
    for (int s = lane; s < args.segments; s += 32) {
      if (row.segments[s].x == largest) found = min(found, s);
    }
    found = __reduce_min_sync(kFullWarp, found);
    if (!row.has(found)) return;
    const int column = row.find_column(
        found, 0, [&](float x) { return static_cast<uint64_t>(x == largest ? 1 : 0); });
    row.write_token(column, 0.0f);
    return;
  }

  const bool own_seed = args.seed.of_rows != nullptr;
  const uint64_t random = philox(static_cast<uint64_t>(parameter(args.seed, place)),
                                 static_cast<uint64_t>(parameter(args.offset, place)),
                                 static_cast<uint64_t>(own_seed ? 0 : place));
  filters |= largest == kInfinity;  // only these tokens have weight
  // A segment's weight in units of 1 / `unit`.
  const auto weight_of = [&](int s, float unit) {
    const float2 pair = row.segments[s];
    if (pair.x == -kInfinity) return uint64_t{0};
    const float factor = exp2_approx((pair.x - largest) * row.scale);
    return static_cast<uint64_t>(__float2ull_rn(pair.y * factor * unit));
  };
  // 2^-32 and less are no weight.
  row.limit = 32.0f / row.scale;
  Bound bound{0xffffffffu, 0xffffffffu};
  if (filters) {
    if (min_p > 0.0f) row.limit = fminf(row.limit, fmaxf(-log2f(min_p), 0.0f) / row.scale);
    uint64_t whole = 0;
    if (of_all && largest < kInfinity) {
#pragma unroll 1
      for (int s = lane; s < args.segments; s += 32) whole += weight_of(s, kUnit);
      whole = warp_sum(whole);
      // All smaller ones together are less than what top-p leaves out.
      const float least = (1.0f - fmaxf(top_p, 0.0f)) / (2.0f * args.columns);
      row.limit = fminf(row.limit, -log2f(least) / row.scale);
    }
    // As many groups have a token at least as large as the k-th largest maximum.
    const int groups = grouped ? kGroups * args.segments : args.segments;
    const int least = by_count ? top_k : whole > 0 ? min(groups * 3 / 4, 200) : 0;
    const float limit = row.limit;
    if (0 < least && least <= groups) {
      const auto top = [&](int g) { return grouped ? shared.tops[g] : row.segments[g].x; };
      // Two threads count for a group where there are enough threads.
      const int share = groups <= kSampleThreads / 2 ? 2 : 1;
      for (int begin = 0; begin < groups; begin += kSampleThreads / share) {
        const int g = begin + threadIdx.x / share;
        const float own = top(min(g, groups - 1));
        int above = 0;
#pragma unroll 8
        for (int other = threadIdx.x % share; other < groups; other += share) {
          const float x = top(other);
          above += x > own || (x == own && other < g) ? 1 : 0;
        }
        if (share == 2) above += __shfl_xor_sync(kFullWarp, above, 1);
        if (g < groups && above == least - 1) shared.bound = row.distance(own);
      }
      __syncthreads();
      row.limit = fminf(row.limit, shared.bound);
    }
    uint64_t mass;
    const uint32_t count = row.gather(&mass);
    const bool enough = whole == 0 || row.limit == limit || mass >= part_of(top_p, whole);
    if (count <= kFew && enough) {
      row.send(rank);
      if (rank == 0) row.choose(count, by_count ? top_k : 0, by_mass ? top_p : 1.0f, whole, random);
      return;
    }
    if (!by_count) row.limit = limit;
    row.origin = __uint_as_float((__float_as_uint(row.limit) & 0x7f800000u) + 0x00800000u);
    uint2 window = make_uint2(0, (1u << kFixedBits) - 1);
    if (by_count) bound = row.select(bound, false, top_k, 0.0f, window);
    if (by_mass) {
      if (whole > 0) window = row.guess(top_p);
      bound = row.select(bound, true, whole > 0 ? part_of(top_p, whole) : 0, top_p, window);
    }
#pragma unroll 1
    for (int segment = first + warp; segment < last; segment += kWarps) {
      uint64_t mass = 0;
      if (row.distance(row.segments[segment].x) <= row.limit) {
        const uint4* held = &row.held[(segment - first) * (kSampleSegment / kPerVector<Held>)];
#pragma unroll 2
        for (int v = lane; v < kSampleSegment / kPerVector<Held>; v += 32) {
          uint32_t some[4];
          float values[kPerVector<Held>];
          load_vector(some, &held[v]);
          unpack<Held>(some, values);
#pragma unroll
          for (float x : values) {
            const float d = row.distance(x);
            if (row.within(d, bound)) mass += row.weight(d);
          }
        }
        mass = warp_sum(mass);
      }
      if (lane < args.blocks) {
        store_remote(reinterpret_cast<float2*>(&row.masses[segment]), lane,
                     make_float2(__uint_as_float(static_cast<uint32_t>(mass)),
                                 __uint_as_float(static_cast<uint32_t>(mass >> 32))));
      }
    }
    row.meet();
  }
  if (warp != 0) return;

  uint64_t remains;
  int column;
  if (filters) {
    const int segment = row.find_segment(random, [&](int s) { return row.masses[s]; }, &remains);
    if (!row.has(segment)) return;
    column = row.find_column(segment, remains, [&](float x) {
      const float d = row.distance(x);
      return static_cast<uint64_t>(row.within(d, bound) ? row.weight(d) : 0);
    });
  } else {
    const int segment =
        row.find_segment(random, [&](int s) { return weight_of(s, kFineUnit); }, &remains);
    if (!row.has(segment)) return;
    column = row.find_column(segment, remains, [&](float x) {
      return static_cast<uint64_t>(
          __float2ull_rn(exp2_approx((x - largest) * row.scale) * kFineUnit));
    });
  }
  row.write_token(column, row.value_at(column) - largest);
}

#define TIERCEL_SAMPLE(type, penalties)                  \
  {DType::k##type, penalties,                            \
   Kernel("sample<" #type ", penalties=" #penalties ">", \
          reinterpret_cast<const void*>(sample<type, penalties>), kSampleLargestSmem)}
#define TIERCEL_TYPE(type) TIERCEL_SAMPLE(type, false), TIERCEL_SAMPLE(type, true)

const SampleKernel kKernels[] = {TIERCEL_TYPE(Float32), TIERCEL_TYPE(BFloat16),
                                 TIERCEL_TYPE(Float16)};

}  // namespace

const SampleKernel* sample_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
