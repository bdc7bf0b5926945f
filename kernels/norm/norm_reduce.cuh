// SPDX-License-Identifier: Apache-2.0
// The parameters' gradients: what norm_backward's blocks leave of them, and a second kernel that
// adds it up.
#ifndef KERNELS_NORM_NORM_REDUCE_CUH_
#define KERNELS_NORM_NORM_REDUCE_CUH_

#include <cstdint>

#include "kernels/norm/elements.cuh"
#include "kernels/norm/norm_kernels.h"
#include "kernels/norm/teams.cuh"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {

// Adds the sums of the block's teams, which have the same columns, in `shared`, and writes them to
// `out`. `lanes` of a warp have a row; a team has `slice` columns, `columns` of them real.
template <bool kWide, int kVectors, int kElements>
__device__ __forceinline__ void leave_sums(float (&sums)[kVectors][kElements], const Team& team,
                                           int lanes, float* shared, int slice, int columns,
                                           float* out) {
#pragma unroll 1
  for (int offset = lanes; offset < 32; offset *= 2) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        sums[v][i] += __shfl_xor_sync(kFullWarp, sums[v][i], offset);
      }
    }
  }
  const int teams = blockDim.x / 32 / team.warps;
  __syncthreads();  // the memory was used for something else
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * team.places + team.place) * kElements;
    if (column >= columns || threadIdx.x % 32 >= lanes) continue;
    float4* const to = reinterpret_cast<float4*>(shared + team.index * slice + column);
#pragma unroll
    for (int p = 0; p < kElements / 4; ++p) {
      to[p] =
          make_float4(sums[v][4 * p], sums[v][4 * p + 1], sums[v][4 * p + 2], sums[v][4 * p + 3]);
    }
  }
  __syncthreads();
  constexpr int kTogether = kWide ? 4 : 1;  // rows on 16 bytes have whole vectors
#pragma unroll 1
  for (int c = threadIdx.x * kTogether; c < columns; c += blockDim.x * kTogether) {
    float sum[kTogether] = {};
#pragma unroll 4
    for (int t = 0; t < teams; ++t) {
      uint32_t words[kTogether];
      load_vector(words, shared + t * slice + c);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) sum[i] += __uint_as_float(words[i]);
    }
    uint32_t words[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) words[i] = __float_as_uint(sum[i]);
    store_vector(out + c, words);
  }
}

// A warp's lanes take neighbouring columns, its warps every sixteenth part. All that one
// multiprocessor each leaves is under way at once: this kernel is but latency.
template <typename Format>
__global__ void __launch_bounds__(kNormReduceThreads)
    norm_reduce(const __grid_constant__ NormReduceArgs args) {
  constexpr int kWarps = kNormReduceThreads / 32;
  constexpr int kAtOnce = (132 + kWarps - 1) / kWarps;
  __shared__ float sums[kWarps][32];
  const int kind = blockIdx.y;
  const int column = blockIdx.x * 32 + threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  grid_dependency_wait();
  grid_dependency_launch();
  if (args.out[kind] == nullptr) return;
  float sum = 0.0f;
  const float* const from = args.partial[kind] + column;
#pragma unroll 1
  for (int first = warp; first < args.parts; first += kAtOnce * kWarps) {
    float some[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int part = first + i * kWarps;
      some[i] = part < args.parts && column < args.columns
                    ? from[static_cast<int64_t>(part) * args.columns]
                    : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += some[i];
  }
  sums[warp][threadIdx.x % 32] = sum;
  __syncthreads();
  if (warp != 0 || column >= args.columns) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += sums[w][threadIdx.x];
  if (args.float32[kind]) {
    reinterpret_cast<float*>(args.out[kind])[column] = sum;
  } else {
    Chunk<Format, false> one;
    one.words[0] = Format::to_bits(sum);
    one.store(args.out[kind] + column * Format::kBytes);
  }
}

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_REDUCE_CUH_
