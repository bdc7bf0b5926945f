// SPDX-License-Identifier: Apache-2.0
// The parameters' gradients: the partial sums that norm_backward's blocks write, and a second
// kernel that adds them up.
#ifndef KERNELS_NORM_NORM_REDUCE_CUH_
#define KERNELS_NORM_NORM_REDUCE_CUH_

#include <cstdint>

#include "kernels/norm/elements.cuh"
#include "kernels/norm/norm_kernels.h"
#include "kernels/norm/teams.cuh"
#include "kernels/sm90/discard.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/prefetch.h"

namespace tiercel {

// Adds the sums of the block's teams, which own the same columns, in `shared`, and writes those of
// kind k to `out[k]` unless that is null. A row has `lanes` lanes of a warp; a team has `slice`
// columns, `columns` of them real, and `room` floats of its own in `shared`. If its sums fit there,
// it need not wait for the other teams' last rows before it stores them.
template <bool kAligned16, int kKinds, int kVectors, int kElements>
__device__ __forceinline__ void leave_sums(float (&sums)[kKinds][kVectors][kElements],
                                           const Team& team, int lanes, float* shared, int room,
                                           int slice, int columns, float* const (&out)[kKinds]) {
#pragma unroll 1
  for (int offset = lanes; offset < 32; offset *= 2) {
#pragma unroll
    for (int k = 0; k < kKinds; ++k) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          sums[k][v][i] += __shfl_xor_sync(kFullWarp, sums[k][v][i], offset);
        }
      }
    }
  }
  const int teams = blockDim.x / 32 / team.warps;
  const bool alone = kAligned16 && teams == 1;
  const bool own = kAligned16 && room >= kKinds * slice;
  const int pitch = own ? room : kKinds * slice;
  if (!alone && !own) __syncthreads();  // the memory was in use for rows
#pragma unroll
  for (int k = 0; k < kKinds; ++k) {
    float* const to = alone ? out[k] : shared + team.index * pitch + k * slice;
    if (out[k] == nullptr) continue;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = (v * team.places + team.place) * kElements;
      if (column >= columns || threadIdx.x % 32 >= lanes) continue;
#pragma unroll
      for (int p = 0; p < kElements; p += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(sums[k][v][p + i]);
        store_vector(to + column + p, words);
      }
    }
  }
  if (alone) return;
  __syncthreads();
  constexpr int kTogether = kAligned16 ? 4 : 1;  // rows on 16 bytes have whole vectors
#pragma unroll 1
  for (int at = threadIdx.x * kTogether; at < kKinds * slice; at += blockDim.x * kTogether) {
    const int k = at < slice ? 0 : kKinds - 1, c = at - k * slice;
    float* const to = k == 0 ? out[0] : out[kKinds - 1];
    if (c >= columns || to == nullptr) continue;
    float sum[kTogether] = {};
#pragma unroll 4
    for (int t = 0; t < teams; ++t) {
      uint32_t words[kTogether];
      load_vector(words, shared + t * pitch + at);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) sum[i] += __uint_as_float(words[i]);
    }
    uint32_t words[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) words[i] = __float_as_uint(sum[i]);
    store_vector(to + c, words);
  }
}

// For two blocks of a cluster that each own a row: each sends the other the sums of every
// second vector and writes the total of the rest. This halves what is written and read again.
template <int kVectors, int kElements>
__device__ __forceinline__ void leave_sums_of_pair(float (&sums)[2][kVectors][kElements],
                                                   float4* shared, const NormBackwardArgs& args) {
  constexpr int kQuads = kElements / 4;
  const int rank = static_cast<int>(cluster_rank());
  const auto slot = [&](int v, int kind, int quad) {
    return shared + ((v / 2 * 2 + kind) * kQuads + quad) * blockDim.x + threadIdx.x;
  };
  cluster_arrive();
  cluster_wait();  // the memory was in use for rows
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (v % 2 == rank) continue;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
      for (int kind = 0; kind < 2; ++kind) {
        const float* const own = &sums[kind][v][4 * quad];
        store_remote(slot(v, kind, quad), rank ^ 1, make_float4(own[0], own[1], own[2], own[3]));
      }
    }
  }
  cluster_arrive();
  cluster_wait();  // the other's sums have arrived; no block exits before the other has sent
  const int64_t row = int64_t{blockIdx.x / 2} * args.columns;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = static_cast<int>(v * blockDim.x + threadIdx.x) * kElements;
    if (v % 2 != rank || column >= args.columns) continue;
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
      if (args.partial[kind] == nullptr) continue;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const float* const own = &sums[kind][v][4 * quad];
        const float4 other = *slot(v, kind, quad);
        const uint32_t words[4] = {
            __float_as_uint(own[0] + other.x), __float_as_uint(own[1] + other.y),
            __float_as_uint(own[2] + other.z), __float_as_uint(own[3] + other.w)};
        store_vector(args.partial[kind] + row + column + 4 * quad, words);
      }
    }
  }
}

// Discards the lines that its warp has read, one line per lane: nobody reads them again, but the L2
// would write them to memory while the next grid runs.
template <int kColumns>
__device__ __forceinline__ void discard_parts(const NormReduceArgs& args) {
  if (!args.whole_lines) return;
  __syncwarp();  // the whole warp has read
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // nothing of this is held in registers before
  const int warp = thread / 32, lane = thread % 32;
  const int first_group = blockIdx.x * (kNormReduceThreads / 32 / args.part_warps);
  const int column = (first_group + warp / args.part_warps) * kColumns * 32 + lane % kColumns * 32;
  if (column >= args.columns) return;
  const float* const lines = args.partial[blockIdx.y] + column;
#pragma unroll 1
  for (int part = warp % args.part_warps + lane / kColumns * args.part_warps; part < args.parts;
       part += 32 / kColumns * args.part_warps) {
    discard_line(lines + static_cast<int64_t>(part) * args.columns);
  }
}

// Adds the blocks' partial sums.
//
// Plan: a warp's lanes take neighbouring columns, kColumns each. `part_warps` warps share the same
// columns and split the parts: all 16 for 132 parts; for few parts fewer, and then a block has more
// columns. All loads are in flight at once and bypass the L1, which holds none of the data: this
// kernel is pure latency.
template <typename Format, int kColumns>
__global__ void __launch_bounds__(kNormReduceThreads)
    norm_reduce(const __grid_constant__ NormReduceArgs args) {
  constexpr int kWarps = kNormReduceThreads / 32;
  constexpr int kAtOnce = kNormReduceAtOnce;
  constexpr int kWidth = kColumns * 32;  // columns per warp
  __shared__ float sums[kWarps][kWidth];
  const int kind = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_part = warp % args.part_warps;
  const int group = blockIdx.x * (kWarps / args.part_warps);  // the block's first group of columns
  const int first_column = (group + warp / args.part_warps) * kWidth + lane;
  const int left = args.columns - first_column;
  const float* const from = args.partial[kind] + first_column;
  grid_dependency_launch();
  // The prefetched data need not be final yet; this looks up its page before the wait.
  if (args.out[kind] != nullptr && first_part < args.parts && left > 0 && lane == 0) {
    prefetch_l2(from + static_cast<int64_t>(first_part) * args.columns);
  }
  grid_dependency_wait();
  if (args.out[kind] == nullptr) return;
  float sum[kColumns] = {};
#pragma unroll 1
  for (int first = first_part; first < args.parts; first += kAtOnce * args.part_warps) {
    float some[kAtOnce][kColumns];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int part = first + i * args.part_warps;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        some[i][c] = part < args.parts && c * 32 < left
                         ? __ldcg(from + static_cast<int64_t>(part) * args.columns + c * 32)
                         : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[c] += some[i][c];
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sums[warp][c * 32 + lane] = sum[c];
  discard_parts<kColumns>(args);
  __syncthreads();
  const int own = threadIdx.x / kWidth, at = threadIdx.x % kWidth;
  const int column = (group + own) * kWidth + at;
  if (own >= kWarps / args.part_warps || column >= args.columns) return;
  float total = 0.0f;
#pragma unroll 4
  for (int w = 0; w < args.part_warps; ++w) total += sums[own * args.part_warps + w][at];
  if (args.float32[kind]) {
    reinterpret_cast<float*>(args.out[kind])[column] = total;
  } else {
    Chunk<Format, false> one;
    one.words[0] = Format::to_bits(total);
    one.store(args.out[kind] + column * Format::kBytes);
  }
}

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_REDUCE_CUH_
