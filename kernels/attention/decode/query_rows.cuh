// SPDX-License-Identifier: Apache-2.0
// The rows of q and of the result of a sequence: equally many for each sequence, or from `starts`.
#ifndef KERNELS_ATTENTION_DECODE_QUERY_ROWS_CUH_
#define KERNELS_ATTENTION_DECODE_QUERY_ROWS_CUH_

#include <cstdint>

#include "kernels/attention/decode/kernels.h"
#include "kernels/sm90/vector.cuh"

namespace tiercel {

// Loads element `at` of integers that are `step` bytes apart.
__device__ __forceinline__ int32_t load_strided(const int32_t* from, int32_t step, int at) {
  return *reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(from) +
                                           static_cast<int64_t>(step) * at);
}

// A sequence's queries: rows of q, counted from where its stride begins. Of more than there is room
// for, the first ones or none.
struct QueryRows {
  int first, count;
};

__device__ __forceinline__ int start_of(const DecodeArgs& args, int b) {
  return min(max(load_strided(args.starts, args.start_step, b), 0), args.total);
}

__device__ __forceinline__ QueryRows query_rows(const DecodeArgs& args, int b) {
  if (args.starts == nullptr) return {0, args.queries};
  const int first = start_of(args, b), end = start_of(args, b + 1);
  if (args.skips_longer && end - first > args.queries) return {first, 0};
  return {first, min(max(end - first, 0), args.queries)};
}

// With `starts`: zeros, and minus infinity as logarithms, in rows of no sequence, and in those that
// a sequence has beyond the most.
__device__ __forceinline__ void clear_rows(const DecodeArgs& args, int first, int last, int thread,
                                           int threads) {
  const int vectors = args.d / 8;
  const uint32_t zeros[4] = {};
#pragma unroll 1
  for (int row = first; row < last; ++row) {
#pragma unroll 1
    for (int at = thread; at < args.heads * vectors; at += threads) {
      const int head = at / vectors, vector = at % vectors;
      store_vector(args.out + row * args.out_strides[1] + head * args.out_strides[2] + vector * 16,
                   zeros);
      if (vector == 0 && args.lse != nullptr)
        args.lse[head * args.lse_strides[1] + row] = -INFINITY;
    }
  }
}

template <int kThreads>
__device__ __forceinline__ void clear_other_rows(const DecodeArgs& args) {
  const int begin = start_of(args, 0), end = max(start_of(args, args.batch), begin);
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
#pragma unroll 1
  for (int i = block; i < args.total - (end - begin); i += blocks) {
    const int row = i < begin ? i : i + end - begin;
    clear_rows(args, row, row + 1, threadIdx.x, kThreads);
  }
  if (args.skips_longer) return;
#pragma unroll 1
  for (int b = block * kThreads + threadIdx.x; b < args.batch; b += blocks * kThreads) {
    clear_rows(args, start_of(args, b) + args.queries, start_of(args, b + 1), 0, 1);
  }
}

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_DECODE_QUERY_ROWS_CUH_
