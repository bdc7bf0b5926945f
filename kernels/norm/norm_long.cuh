// SPDX-License-Identifier: Apache-2.0
// rms_norm and layer_norm of long rows, 16-byte aligned, with parameters of x's type.
//
// Plan: as norm_forward, but a block's part of the row stays in shared memory, where each thread
// copies the elements it needs asynchronously. Registers hold the parameters instead, whose loads
// overlap the cluster's exchange, and more blocks fit on a multiprocessor.
//
// Lower bound: as norm_forward.
#ifndef KERNELS_NORM_NORM_LONG_CUH_
#define KERNELS_NORM_NORM_LONG_CUH_

#include "kernels/norm/moments.cuh"
#include "kernels/norm/parameters.cuh"
#include "kernels/norm/teams.cuh"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/tma.cuh"

namespace tiercel {

// Calls visit(v) for each of a thread's copies, once that copy and those before it have arrived.
template <int kVectors, int kFirst = 0, typename Visit>
__device__ __forceinline__ void as_they_arrive(Visit visit) {
  if constexpr (kFirst < kVectors) {
    async_copy_wait<kVectors - 1 - kFirst>();
    visit(kFirst);
    as_they_arrive<kVectors, kFirst + 1>(visit);
  }
}

template <typename Format, int kVectors, bool kLayerNorm>
__global__ void __launch_bounds__(kNormLongThreads, norm_long_resident_blocks(kVectors, kLayerNorm))
    norm_long(const __grid_constant__ NormForwardArgs args) {
  using Values = Chunk<Format, true>;
  constexpr int kElements = Values::kElements;
  __shared__ uint4 held[kVectors * kNormLongThreads];
  __shared__ BlockScratch scratch;

  const int row = blockIdx.x >> args.cluster_log2;
  const int rank = blockIdx.x & ((1 << args.cluster_log2) - 1);
  const int first = rank * args.slice;
  const int columns = min(args.slice, args.columns - first);
  const int bytes = columns * Format::kBytes;
  const char* const x = args.x + int64_t{row} * args.x_stride + first * Format::kBytes;
  const auto slot = [&](int v) { return v * kNormLongThreads + static_cast<int>(threadIdx.x); };
  const auto valid = [&](int v) { return slot(v) * 16 < bytes; };
  const auto each = [&](auto visit) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (valid(v)) visit(v);
    }
  };
  const auto unpack = [&](int v, float (&f)[kElements]) {
    Values value;
    value.load_any(reinterpret_cast<const char*>(&held[slot(v)]));
    value.unpack(f);
  };

  // Compute the addresses of all loads before the wait, so that the loads follow it at once. The
  // address of `out`, too, would spill.
  const int mine = first * Format::kBytes + static_cast<int>(threadIdx.x) * 16;
  const char* from = args.x + int64_t{row} * args.x_stride + mine;
  const char* weight = args.weight == nullptr ? nullptr : args.weight + mine;
  const char* bias = args.bias == nullptr ? nullptr : args.bias + mine;
  char* const out = args.out + int64_t{row} * args.out_stride + mine;
  materialize_now(from, weight, bias);
  constexpr int kStep = kNormLongThreads * 16;

  const BlockTeam team(rank, 1 << args.cluster_log2);
  team.start(scratch);
  if (threadIdx.x == 0 && static_cast<int>(blockIdx.x) < args.prefetch_blocks)
    bulk_prefetch(x, bytes);
  grid_dependency_wait();
  grid_dependency_launch();

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (valid(v)) async_copy_16(shared_address(&held[slot(v)]), from + v * kStep, true);
    async_copy_commit();
  }
  Values weights[kVectors], biases[kVectors];
  // With eight vectors the last bias is loaded once the first result has freed its registers.
  constexpr int kEarly = kVectors > 4 ? kVectors - 1 : kVectors;
  const auto ask_bias = [&](int from, int to) {
    each([&](int v) {
      if (kLayerNorm && v >= from && v < to) {
        read_packed<Format>(biases[v], bias, v * kStep, 0.0f);
      }
    });
  };
  each([&](int v) { read_packed<Format>(weights[v], weight, v * kStep, 1.0f); });
  if constexpr (kLayerNorm) {
    ask_bias(0, kEarly);
  }

  RowMoments moments = {};
  if constexpr (!kLayerNorm) {
    as_they_arrive<kVectors>([&](int v) {
      if (!valid(v)) return;
      float f[kElements];
      unpack(v, f);
#pragma unroll
      for (int i = 0; i < kElements; ++i) moments.square += f[i] * f[i];
    });
    moments.square = team.sum(scratch, lanes_reduce<32>(moments.square, Sum()));
  } else {
    Distances<1> distances;
    as_they_arrive<kVectors>([&](int v) {
      if (!valid(v)) return;
      float f[kElements];
      unpack(v, f);
      if (v == 0) distances.measure_from(f[0]);
      distances.add(f);
    });
    int elements = 0;
    each([&](int) { elements += kElements; });
    moments = team.join(scratch, distances.of_warp(Count(elements)).entry(Count::of_warp(elements)),
                        args.inverse_columns);
  }
  const float rstd = reciprocal_root(fmaf(moments.square, args.inverse_columns, args.eps));

  const Normaliser<Format, kLayerNorm> normalised(moments, rstd);
  each([&](int v) {
    Values value;
    value.load_any(reinterpret_cast<const char*>(&held[slot(v)]));
    normalised(value, weights[v], biases[v]).store(out + v * kStep);
    if (v == 0) ask_bias(kEarly, kVectors);
  });
}

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_LONG_CUH_
