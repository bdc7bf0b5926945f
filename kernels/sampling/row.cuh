// SPDX-License-Identifier: Apache-2.0
// A row of logits in the shared memory of a cluster, and the steps that all rows need.
#ifndef KERNELS_SAMPLING_ROW_CUH_
#define KERNELS_SAMPLING_ROW_CUH_

#include <cstdint>

#include "kernels/sampling/logits.cuh"
#include "kernels/sampling/sample_kernels.h"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/tma.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {

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
    struct {
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
        float tops[kGroupedSegments * kGroups];  // the largest of each group of lanes' logits
      };
    };
    uint32_t tallies[kSampleValues];  // tokens of each number
  };
  uint64_t random;
  uint64_t of_warps[kWarps];
  uint4 found[kSampleBlocks];  // each block's number of candidates, and the sum of their weights
  uint64_t before, amount;     // of the bin that the target is in, and in it
  uint64_t arrived[kSampleRounds];  // barriers of the copies
  uint32_t bin, tokens;
  uint32_t candidates;  // of this block
  float bound;          // a distance
};

// The threads that work on a row whose logits are in the shared memory of a cluster: all.
struct Cluster {
  static constexpr bool kHeld = true;
  __device__ __forceinline__ static uint32_t thread() { return threadIdx.x; }
  __device__ __forceinline__ static void sync() { __syncthreads(); }
};

// Those that work on a row whose logits stay in the L2: the last ones of a block.
struct Finishers {
  static constexpr bool kHeld = false;
  __device__ __forceinline__ static uint32_t thread() { return threadIdx.x - 32 * kStreamWarps; }
  __device__ __forceinline__ static void sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(kSampleThreads) : "memory");
  }
};

// Where copies bring segments to a warp.
struct Staging {
  char* slots;
  uint64_t* arrived;
  uint32_t copies;  // so far
};

template <typename Format, typename Team = Cluster>
struct Row {
  const SampleArgs& args;
  int64_t row;
  int first, last;   // segments of this block
  uint4* held;       // its logits
  float2* segments;  // maximum and sum of weights of each segment of the row
  uint64_t* masses;  // of each segment
  float* sums;       // of each segment at temperature 1
  Shared& shared;
  float scale;    // log2(e) / T
  float largest;  // of the row
  float limit;    // the largest d that counts
  float origin;   // a power of two above it
  // Of a row that is not held: its last segment, if this is not whole, and those that copies bring.
  const uint4* tail;
  Staging* staging;
  mutable const uint4* staged;  // the segment that each_segment() is at, or null

  __device__ __forceinline__ static uint32_t thread() { return Team::thread(); }
  __device__ __forceinline__ static void sync() { Team::sync(); }
  __device__ __forceinline__ uint32_t blocks() const { return Team::kHeld ? args.blocks : 1; }
  // Each segment of a held row that has few has the maxima of groups of lanes.
  __device__ __forceinline__ bool grouped() const {
    return Team::kHeld && args.segments <= kGroupedSegments;
  }

  __device__ __forceinline__ bool is_tail(int segment) const {
    return tail != nullptr && segment == last - 1;
  }
  __device__ __forceinline__ const uint4* logits_of(int segment) const {
    if constexpr (!Team::kHeld) {
      if (staged != nullptr) return staged;
      if (is_tail(segment)) return tail;
    }
    return &held[(segment - first) * (kSampleSegment / kPerVector<Format>)];
  }

  __device__ __forceinline__ void meet() const {
    if (blocks() == 1) {
      sync();
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
  // Rows without filters: the weights of a segment and of a token, in units of 1 / `unit`.
  __device__ __forceinline__ uint64_t segment_weight(int segment, float unit) const {
    const float2 pair = segments[segment];
    if (pair.x == -kInfinity) return 0;
    const float factor = exp2_approx((pair.x - largest) * scale);
    return __float2ull_rn(pair.y * factor * unit);
  }
  __device__ __forceinline__ uint64_t fine_weight(float x) const {
    return __float2ull_rn(exp2_approx(-distance(x) * scale) * kFineUnit);
  }
  __device__ __forceinline__ bool within(float d, const Bound& bound) const {
    return d <= limit && fixed(d) <= bound.fixed && __float_as_uint(d) <= bound.bits;
  }

  // The distance of a point in fixed point, up to a rounding.
  __device__ __forceinline__ float of_fixed(uint32_t point) const {
    return __uint_as_float(__float_as_uint(origin) + point) - origin;
  }
  __device__ __forceinline__ float step() const { return origin * (1.0f / (1 << kFixedBits)); }

  // Bounds of the logits with a distance of at most `to`, and at least `from`: a bit further away.
  __device__ __forceinline__ float low_of(float to) const {
    const float x = largest - to;
    return x - 0x1p-22f * fminf(fabsf(largest) + fabsf(x), 1e38f);
  }
  __device__ __forceinline__ float high_of(float from) const {
    const float x = largest - from;
    return x + 0x1p-22f * fminf(fabsf(largest) + fabsf(x), 1e38f);
  }

  // A bit for each of this lane's logits of a segment that may be at least `low` and at most
  // `high`.
  __device__ __forceinline__ uint32_t hits_of(const uint4* part, float low, float high) const {
    constexpr int kColumns = kPerVector<Format>;
    uint32_t hits = 0;
    uint32_t least = 0, most = 0;
    if constexpr (Format::kPerWord == 2) {
      // A number of the format further away, whatever the rounding.
      const float lows[2] = {low - fminf(fabsf(low), 1e38f) * 0x1p-7f - 0x1p-20f, 0.0f};
      const float highs[2] = {high + fminf(fabsf(high), 1e38f) * 0x1p-7f + 0x1p-20f, 0.0f};
      least = (Format::pack(lows) & 0xffffu) * 0x10001u;
      most = (Format::pack(highs) & 0xffffu) * 0x10001u;
    }
    // Registers are scarce.
#pragma unroll 4
    for (int i = 0; i < 32 / kColumns; ++i) {
      uint32_t words[4];
      load_vector(words, &part[i * 32 + threadIdx.x % 32]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int bit = i * 4 + k;
        if constexpr (Format::kPerWord == 2) {
          hits |= pairs_at_least<Format>(words[k], least) & pairs_at_least<Format>(most, words[k]) &
                  (0x10001u << bit);
        } else {
          const float x = __uint_as_float(words[k]);
          if (x >= low && x <= high) hits |= 1u << bit;
        }
      }
    }
    return hits;
  }

  // Calls f(d, column) for this lane's part of the segment's tokens with a distance in the range.
  // The test of a token takes few instructions; what follows is for the hits alone, so that lanes
  // do not wait for each other's.
  template <typename Function>
  __device__ __forceinline__ void each_of(int segment, float from, float to, Function f) const {
    constexpr int kColumns = kPerVector<Format>, kPerWord = Format::kPerWord;
    static_assert(kSampleSegment == 32 * 32);
    const uint32_t lane = threadIdx.x % 32;
    const auto* part = logits_of(segment);
    uint32_t hits = hits_of(part, low_of(to), high_of(from));
#pragma unroll 1
    for (; hits != 0; hits &= hits - 1) {
      const uint32_t hit = __ffs(hits) - 1;
      const uint32_t word = hit % (32 / kPerWord), half = hit / (32 / kPerWord);
      const uint32_t inside = (word / 4 * 32 + lane) * kColumns + word % 4 * kPerWord + half;
      const float d = distance(
          load_element<Format>(reinterpret_cast<const char*>(part) + inside * Format::kBytes));
      if (d >= from && d <= to) f(d, segment * kSampleSegment + inside);
    }
  }

  // Calls f(segment) for this warp's segments that have a token up to the distance.
  template <typename Function>
  __device__ __forceinline__ void each_segment(float to, Function f) const {
    if constexpr (Team::kHeld) {
#pragma unroll 1
      for (int segment = first + thread() / 32; segment < last; segment += kWarps) {
        if (distance(segments[segment].x) <= to) f(segment);
      }
    } else {
      each_copied(to, f);
    }
  }

  // each_segment() with copies of the next segments in flight.
  template <typename Function>
  __device__ __forceinline__ void each_copied(float to, Function f) const {
    constexpr int kBytes = kSampleSegment * Format::kBytes;
    const int lane = threadIdx.x % 32, warp = thread() / 32;
#pragma unroll 1
    for (int begin = first + warp; begin < last; begin += 32 * kWarps) {
      const int own = begin + lane * kWarps;
      const bool has = own < last && distance(segments[min(own, last - 1)].x) <= to;
      unsigned hits = __ballot_sync(kFullWarp, has), ahead = hits;
      const auto segment_of = [&](unsigned bits) { return begin + (__ffs(bits) - 1) * kWarps; };
      uint32_t issued = staging->copies;
      const auto fetch = [&] {
        if (ahead == 0) return;
        const int segment = segment_of(ahead);
        ahead &= ahead - 1;
        if (is_tail(segment)) return;
        const uint32_t slot = issued++ % kStagedSegments;
        if (lane != 0) return;
        mbarrier_expect(&staging->arrived[slot], kBytes);
        bulk_load(staging->slots + slot * kBytes,
                  reinterpret_cast<const char*>(held) + static_cast<int64_t>(segment) * kBytes,
                  kBytes, &staging->arrived[slot]);
      };
#pragma unroll 1
      for (int i = 0; i < kStagedSegments; ++i) fetch();
#pragma unroll 1
      for (; hits != 0; hits &= hits - 1) {
        const int segment = segment_of(hits);
        if (is_tail(segment)) {
          staged = tail;
        } else {
          const uint32_t copy = staging->copies++, slot = copy % kStagedSegments;
          mbarrier_wait(&staging->arrived[slot], copy / kStagedSegments % 2);
          staged = reinterpret_cast<const uint4*>(staging->slots + slot * kBytes);
        }
        f(segment);
        __syncwarp();
        fetch();
      }
    }
    staged = nullptr;
  }

  // The sum of the values of all threads of the block.
  __device__ __forceinline__ uint64_t block_sum(uint64_t value) const {
    value = warp_sum(value);
    sync();  // the last sum has been read
    if (thread() % 32 == 0) shared.of_warps[thread() / 32] = value;
    sync();
    value = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) value += shared.of_warps[warp];
    return value;
  }

  // Sends the block's number of candidates, and the sum of its threads' values, to all blocks.
  __device__ __forceinline__ void publish(uint64_t own) const {
    own = block_sum(own);
    if (thread() < blocks()) {
      const uint32_t rank = blocks() > 1 ? cluster_rank() : 0;
      store_remote(reinterpret_cast<float4*>(&shared.found[rank]), thread(),
                   make_float4(__uint_as_float(shared.candidates), 0.0f,
                               __uint_as_float(static_cast<uint32_t>(own)),
                               __uint_as_float(static_cast<uint32_t>(own >> 32))));
    }
  }
  // A block's sum, and that of all blocks, after meet().
  __device__ __forceinline__ uint64_t published(uint32_t rank) const {
    const uint4 found = shared.found[rank];
    return static_cast<uint64_t>(found.w) << 32 | found.z;
  }
  __device__ __forceinline__ uint64_t published() const {
    uint64_t all = 0;
#pragma unroll 1
    for (uint32_t rank = 0; rank < blocks(); ++rank) all += published(rank);
    return all;
  }

  // The first segment that has this maximum, or their number. For one warp.
  __device__ __forceinline__ int segment_of(float largest) const {
    int segment = args.segments;
#pragma unroll 1
    for (int s = threadIdx.x % 32; s < args.segments; s += 32) {
      if (segments[s].x == largest) segment = min(segment, s);
    }
    return __reduce_min_sync(kFullWarp, segment);
  }

  // The segment whose `amount` makes the running sum exceed `target(sum of all)`, and what of the
  // target remains in it. For one warp.
  template <typename Target, typename Amount>
  __device__ __forceinline__ int find_segment(Target target_of, Amount amount,
                                              uint64_t* remains) const {
    const int lane = threadIdx.x % 32;
    const int each = (args.segments + 31) / 32;
    const int begin = min(lane * each, args.segments), end = min(begin + each, args.segments);
    uint64_t own = 0;
#pragma unroll 1
    for (int s = begin; s < end; ++s) own += amount(s);
    uint64_t running = warp_running_sum(own);
    const uint64_t all = __shfl_sync(kFullWarp, running, 31);
    const uint64_t target = target_of(all);
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
      load_vector(words, &logits_of(segment)[v]);
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
      const auto pair = [&](int s) { return make_float2(segments[s].x, sums[s]); };
      logprob = below - logf(plain_sum(args.segments, largest, pair));
    }
    if (lane == 0) write(column, logprob);
  }
};

}  // namespace tiercel

#endif  // KERNELS_SAMPLING_ROW_CUH_
