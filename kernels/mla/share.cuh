// SPDX-License-Identifier: Apache-2.0
// A lane's share of the steps of all sequences.
#ifndef KERNELS_MLA_SHARE_CUH_
#define KERNELS_MLA_SHARE_CUH_

#include <cstdint>

#include "kernels/mla/mla_kernels.h"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

// Loads element `at` of integers that are `step` bytes apart.
__device__ __forceinline__ int32_t load_strided(const int32_t* from, int64_t step, int64_t at) {
  return *reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(from) + step * at);
}

__device__ __forceinline__ int length_of(const MlaDecodeArgs& args, int b) {
  return min(max(load_strided(args.lengths, args.length_step, b), 0), args.capacity);
}

// An empty sequence takes one step: its results have to be written.
__device__ __forceinline__ int steps_of(int length) {
  return max((length + kMlaStep - 1) / kMlaStep, 1);
}

// The steps of all sequences, one after the other, are dealt to lanes in equal runs. So a sequence
// is in one lane, or in several that follow each other. In the batch-invariant mode each sequence
// has as many lanes as the longest may need, and begins with the first of its own.
struct Share {
  int each;    // steps of a lane
  int end;     // of the lane, among all steps
  int b;       // the sequence
  int origin;  // its first step, among all steps
  int length;
  int first, last;  // the lane's steps of the sequence

  // Whole warps call it. False if the lane has no steps.
  __device__ __forceinline__ bool begin(const MlaDecodeArgs& args, int lane) {
    if (args.part_steps > 0) return begin_part(args, lane);
    const int thread = threadIdx.x % 32;
    int total = 0, most = 0;
    for (int at = thread; at < args.batch; at += 32) {
      const int own = steps_of(length_of(args, at));
      total += own;
      most = max(most, own);
    }
    total = lanes_reduce<32>(total, Sum());
    most = lanes_reduce<32>(most, [](int a, int b) { return max(a, b); });
    each = (total + args.lanes - 1) / args.lanes;
    if (total == most * args.batch) each = level(each, most);
    const int from = lane * each;
    end = min(from + each, total);
    if (from >= end) return false;
    origin = 0;
    for (int base = 0;; base += 32) {
      const int at = base + thread;
      const int own = at < args.batch ? steps_of(length_of(args, at)) : 0;
      int before = own;  // the sum up to this one
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(kFullWarp, before, offset);
        if (thread >= offset) before += other;
      }
      const unsigned found = __ballot_sync(kFullWarp, origin + before > from);
      if (found != 0) {
        const int one = __ffs(static_cast<int>(found)) - 1;
        b = base + one;
        origin += __shfl_sync(kFullWarp, before - own, one);
        break;
      }
      origin += __shfl_sync(kFullWarp, before, 31);
    }
    enter(args);
    first = from - origin;
    return true;
  }

  // The next sequence; false behind the last.
  __device__ __forceinline__ bool next(const MlaDecodeArgs& args) {
    if (!more()) return false;
    origin += steps();
    ++b;
    enter(args);
    return true;
  }

  // True if next() has one.
  __device__ __forceinline__ bool more() const { return origin + last < end; }

  // How many steps the sequence has.
  __device__ __forceinline__ int steps() const { return steps_of(length); }

  // True if other lanes have steps of the sequence, too.
  __device__ __forceinline__ bool shared() const { return first > 0 || last < steps(); }

  __device__ __forceinline__ int lane_of(int step) const { return (origin + step) / each; }

 private:
  // All sequences have `most` steps: a few steps more for each lane, so that lanes begin with
  // sequences, or with equal parts of them.
  static __device__ __forceinline__ int level(int each, int most) {
    const int parts = most / each;
    const int other = parts > 0 ? (most + parts - 1) / parts : (each + most - 1) / most * most;
    return other - each <= each / 32 + 1 ? other : each;
  }

  __device__ __forceinline__ bool begin_part(const MlaDecodeArgs& args, int lane) {
    const int parts = args.lanes / args.batch, from = lane % parts * args.part_steps;
    each = args.part_steps;
    b = lane / parts;
    origin = b * parts * each;
    end = origin + from + each;
    enter(args);
    if (from >= steps()) return false;
    first = from;
    end = min(end, origin + steps());
    return true;
  }

  __device__ __forceinline__ void enter(const MlaDecodeArgs& args) {
    length = length_of(args, b);
    first = 0;
    last = min(steps(), end - origin);
  }
};

// The line of the workspace for a lane's rows of a sequence that it shares; `begins` if it has the
// sequence's first step.
__device__ __forceinline__ int64_t part_line(const MlaDecodeArgs& args, int lane, bool begins,
                                             int row_block) {
  const int64_t place = args.part_steps > 0 ? lane : int64_t{2} * lane + begins;
  return (place * args.row_blocks + row_block) * args.part_rows;
}

// The natural logarithm of a row's sum, whose terms are relative to 2 to the power of `largest`.
__device__ __forceinline__ float log_of_sum(float largest, float sum) {
  constexpr float kLn2 = 0.693147181f;
  return (largest + log2f(sum)) * kLn2;
}

__device__ __forceinline__ void store_lse(const MlaDecodeArgs& args, int b, int query, int head,
                                          float largest, float sum) {
  if (args.lse == nullptr) return;
  args.lse[(static_cast<int64_t>(b) * args.heads + head) * args.queries + query] =
      log_of_sum(largest, sum);
}

__device__ __forceinline__ void store_lse(const MlaDecodeArgs& args, int b, int row, float largest,
                                          float sum) {
  store_lse(args, b, row / args.heads, row % args.heads, largest, sum);
}

__device__ __forceinline__ char* out_row(const MlaDecodeArgs& args, int b, int row) {
  const int query = row / args.heads, head = row % args.heads;
  return args.out + b * args.out_strides[0] + query * args.out_strides[1] +
         head * args.out_strides[2];
}

}  // namespace tiercel

#endif  // KERNELS_MLA_SHARE_CUH_
