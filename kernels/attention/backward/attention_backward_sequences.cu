// SPDX-License-Identifier: Apache-2.0
// The lists of packed sequences' tiles of keys and blocks of queries, for attention's backward.
//
// A thread takes a sequence, of up to 1024 at a time: starts are clamped to the tensor and to the
// largest earlier start, whatever cu_seqlens holds, so that sequences do not overlap; prefix sums
// give the place of its part of the lists. A warp then writes a sequence's part. The lists are
// short: 8 bytes per 64 or 128 queries, 32 per 64 or 128 keys.
#include "kernels/attention/backward/kernels.h"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

constexpr int kThreads = kAttentionBackwardSequencesThreads;
constexpr int kWarps = kThreads / 32;

struct Both {  // of queries and of keys
  int32_t q;
  int32_t k;
};

struct Largest {
  __device__ int32_t operator()(int32_t a, int32_t b) const { return max(a, b); }
};

struct Total {
  __device__ int32_t operator()(int32_t a, int32_t b) const { return a + b; }
};

// The results of all threads up to this one, after `before`, which becomes that of all threads. No
// operand is negative.
template <typename Operation>
__device__ Both scan(Both value, Both& before, Both* warps, Operation join) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto scan_warp = [&](Both& values) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t q = __shfl_up_sync(0xffffffff, values.q, step);
      const int32_t k = __shfl_up_sync(0xffffffff, values.k, step);
      if (lane >= step) values = {join(values.q, q), join(values.k, k)};
    }
  };
  scan_warp(value);
  if (lane == 31) warps[warp] = value;
  __syncthreads();
  Both others = warps[lane];
  scan_warp(others);
  const int last = (warp + 31) % 32;  // the warp before this one
  const Both earlier{__shfl_sync(0xffffffff, others.q, last),
                     __shfl_sync(0xffffffff, others.k, last)};
  const Both all{__shfl_sync(0xffffffff, others.q, 31), __shfl_sync(0xffffffff, others.k, 31)};
  if (warp > 0) value = {join(value.q, earlier.q), join(value.k, earlier.k)};
  value = {join(before.q, value.q), join(before.k, value.k)};
  before = {join(before.q, all.q), join(before.k, all.k)};
  __syncthreads();  // `warps` is free again
  return value;
}

// The end of sequence i: 0 is what comes before the first start, batch + 1 what comes after the
// last one. Those after it are empty.
__device__ int32_t end_of(const int32_t* starts, int64_t step, int32_t rows, int32_t i,
                          int32_t batch) {
  if (i > batch) return rows;
  return min(max(starts[i * step], 0), rows);
}

struct Sequence {
  Both first_row;
  Both end;
  Both first;  // block of queries, tile of keys
};

__global__ void __launch_bounds__(kThreads)
    attention_backward_sequences(const __grid_constant__ AttentionBackwardSequencesArgs args) {
  static_assert(kWarps == 32, "a warp scans the warps' results");
  __shared__ Both warps[kWarps];
  __shared__ Sequence sequences[kThreads];
  grid_dependency_wait();
  grid_dependency_launch();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t count = args.batch + 2;
  Both row{0, 0}, parts{0, 0};  // where the next 1024 sequences begin
  for (int32_t base = 0; base < count; base += kThreads) {
    const int32_t i = base + static_cast<int32_t>(threadIdx.x);
    const Both found{end_of(args.starts_q, args.step_q, args.rows_q, i, args.batch),
                     end_of(args.starts_k, args.step_k, args.rows_k, i, args.batch)};
    const Both start = row;
    const Both end = scan(found, row, warps, Largest());
    sequences[threadIdx.x].end = end;
    __syncthreads();
    const Both first_row = threadIdx.x == 0 ? start : sequences[threadIdx.x - 1].end;
    const Both mine{(end.q - first_row.q + args.tile_m - 1) / args.tile_m,
                    (end.k - first_row.k + args.tile_n - 1) / args.tile_n};
    const Both behind = scan(mine, parts, warps, Total());
    sequences[threadIdx.x].first_row = first_row;
    sequences[threadIdx.x].first = {behind.q - mine.q, behind.k - mine.k};
    __syncthreads();
    for (int s = warp; s < kThreads && base + s < count; s += kWarps) {
      const Sequence one = sequences[s];
      const bool seen = base + s > 0 && base + s <= args.batch;
      const int32_t seq_q = one.end.q - one.first_row.q, seq_k = one.end.k - one.first_row.k;
      const int32_t blocks = (seq_q + args.tile_m - 1) / args.tile_m;
      for (int32_t b = lane; b < blocks; b += 32) {
        args.blocks[one.first.q + b] = {one.first_row.q + b * args.tile_m, one.end.q};
      }
      const int32_t tiles = (seq_k + args.tile_n - 1) / args.tile_n;
      for (int32_t t = lane; t < tiles; t += 32) {
        args.tiles[one.first.k + t] = {args.descending ? tiles - 1 - t : t,
                                       seq_k,
                                       seen ? seq_q : 0,
                                       one.end.k,
                                       one.first.q,
                                       one.end.q,
                                       {0, 0}};
      }
    }
    __syncthreads();  // `sequences` is free again
  }
  for (int32_t b = parts.q + static_cast<int32_t>(threadIdx.x); b < args.room; b += kThreads) {
    args.blocks[b] = {0, 0};
  }
  if (threadIdx.x == 0) *args.tile_count = parts.k;
}

const Kernel kKernel("attention_backward_sequences",
                     reinterpret_cast<const void*>(attention_backward_sequences));

}  // namespace

const Kernel& attention_backward_sequences_kernel() { return kKernel; }

}  // namespace tiercel
