// SPDX-License-Identifier: Apache-2.0
// reduce down columns: the reduced dimension is not the contiguous one.
//
// Each element is read once. A block processes a strip of columns, kLanes vectors wide: its
// kThreads / kLanes rows of threads move down the strip with kUnroll loads in flight each, and a
// thread keeps a float32 value per place in its vectors. Threads of the same columns combine their
// values by shuffles and shared memory. If there are few strips, several blocks share one, each
// with a part of the rows; this kernel then also combines the parts from a workspace. The order of
// a sum is fixed.
#include <cstdint>

#include "kernels/reduce/accumulate.cuh"
#include "kernels/reduce/columns_shifted.cuh"
#include "kernels/reduce/reduce_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/prefetch.h"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

template <typename Format, typename Op, int kVector, int kLanes, int kUnroll, int kThreads>
__global__ void __launch_bounds__(kThreads)
    reduce_columns(const __grid_constant__ ReduceArgs args) {
  constexpr int kWords = kVector < 4 ? 1 : kVector / 4;  // with half a word, one place is unused
  constexpr int kPlaces = kVector / Format::kBytes;
  using Seen = Accumulator<Format, Op, kWords * 4>;
  constexpr int kWidth = kLanes * kPlaces;  // columns per strip
  constexpr int kDown = kThreads / kLanes;
  constexpr int kWarps = kThreads / 32;
  constexpr int kWarpLanes = kLanes < 32 ? kLanes : 32;
  static_assert(kLanes <= 32, "a warp is at most one row of threads");
  __shared__ float of_warps[kWarps][kWidth];

  const int across = threadIdx.x % kLanes, down = threadIdx.x / kLanes;
  // Blocks of one strip have adjacent indices.
  const unsigned strips = static_cast<unsigned>((args.inner + kWidth - 1) / kWidth);
  const unsigned split = blockIdx.x % args.parts, rest = blockIdx.x / args.parts;
  const int64_t strip = static_cast<int64_t>(rest % strips) * kWidth;
  const int64_t i = rest / strips;
  const int64_t column = strip + across * kPlaces;
  // Parts alternate by rows, so that blocks that run together read adjacent memory.
  const int64_t first = static_cast<int64_t>(split) * kDown + down;
  const int64_t step = static_cast<int64_t>(args.parts) * kDown;
  const int64_t down_stride = step * args.length_stride;
  const char* from =
      args.x + i * args.outer_stride + column * Format::kBytes + first * args.length_stride;
  // Prefetched by the threads at the beginning of 32 bytes.
  if (is_prefetching(args.prefetch_blocks) && across * kVector % 32 == 0 && column < args.inner) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * step < args.length) prefetch_l2(from + u * down_stride);
    }
  }
  grid_dependency_wait();
  grid_dependency_launch();

  Seen seen;
  seen.clear();
  if (column < args.inner) {
    for (int64_t r = first; r < args.length; r += step * kUnroll) {
      uint32_t words[kUnroll][kWords];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[u][w] = none_of<Format, Op>();
        if (r + u * step < args.length) {
          const char* address = from + u * down_stride;
          if constexpr (kVector == 2) {
            words[u][0] =
                __byte_perm(words[u][0], *reinterpret_cast<const uint16_t*>(address), 0x3254);
          } else {
            load_once(words[u], address);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; u += 2) seen.add(words[u], words[u + 1]);
      from += kUnroll * down_stride;
    }
  }
#pragma unroll
  for (int offset = 16; offset >= kWarpLanes; offset /= 2) {
#pragma unroll
    for (int p = 0; p < kPlaces; ++p) {
      seen.values[p] = Op()(seen.values[p], __shfl_xor_sync(kFullWarp, seen.values[p], offset));
    }
  }
  if (threadIdx.x % 32 < kLanes) {
#pragma unroll
    for (int p = 0; p < kPlaces; ++p) {
      of_warps[threadIdx.x / 32][across * kPlaces + p] = seen.values[p];
    }
  }
  __syncthreads();

  const int64_t row = split * args.outer + i;  // of the output
  for (int c = threadIdx.x; c < kWidth; c += kThreads) {
    // Four at a time: half as many sequential roundings, few registers.
    float value;
#pragma unroll
    for (int w = 0; w < kWarps; w += 4) {
      const float some = Op()(Op()(of_warps[w][c], of_warps[w + 1][c]),
                              Op()(of_warps[w + 2][c], of_warps[w + 3][c]));
      value = w == 0 ? some : Op()(value, some);
    }
    if (strip + c < args.inner) {
      store_result(args.out, args.out_dtype, row * args.inner + strip + c, mean_of(value, args));
    }
  }
}

#define TIERCEL_COLUMNS(dtype, op, vector, lanes, unroll, threads)                \
  {DType::k##dtype,                                                               \
   op##Of::kMax,                                                                  \
   ReduceKernel::Kind::columns,                                                   \
   lanes,                                                                         \
   unroll,                                                                        \
   vector,                                                                        \
   threads,                                                                       \
   Kernel("reduce_columns<" #dtype ", " #op ", vector=" #vector ", lanes=" #lanes \
          ", unroll=" #unroll ", threads=" #threads ">",                          \
          reinterpret_cast<const void*>(                                          \
              reduce_columns<dtype##Format, op##Of, vector, lanes, unroll, threads>))}
#define TIERCEL_SHIFTED(dtype, op, lanes, unroll, threads)                                \
  {DType::k##dtype,                                                                       \
   op##Of::kMax,                                                                          \
   ReduceKernel::Kind::columns_shifted,                                                   \
   lanes,                                                                                 \
   unroll,                                                                                \
   16,                                                                                    \
   threads,                                                                               \
   Kernel("reduce_columns_shifted<" #dtype ", " #op ", lanes=" #lanes ", unroll=" #unroll \
          ", threads=" #threads ">",                                                      \
          reinterpret_cast<const void*>(                                                  \
              reduce_columns_shifted<dtype##Format, op##Of, lanes, unroll, threads>))}
#define TIERCEL_ALL_COLUMNS(dtype, op, element)                                               \
  TIERCEL_COLUMNS(dtype, op, 16, 1, 4, 512), TIERCEL_COLUMNS(dtype, op, 16, 1, 4, 256),       \
      TIERCEL_COLUMNS(dtype, op, 16, 2, 4, 512), TIERCEL_COLUMNS(dtype, op, 16, 4, 4, 512),   \
      TIERCEL_COLUMNS(dtype, op, 16, 8, 4, 512), TIERCEL_COLUMNS(dtype, op, 16, 8, 4, 256),   \
      TIERCEL_COLUMNS(dtype, op, 16, 16, 4, 512), TIERCEL_COLUMNS(dtype, op, 16, 32, 4, 512), \
      TIERCEL_COLUMNS(dtype, op, element, 32, 8, 256), TIERCEL_SHIFTED(dtype, op, 32, 4, 256)

// By dtype and operation, then width.
const ReduceKernel kKernels[] = {
    TIERCEL_ALL_COLUMNS(Float32, Sum, 4),  TIERCEL_ALL_COLUMNS(Float32, Max, 4),
    TIERCEL_ALL_COLUMNS(BFloat16, Sum, 2), TIERCEL_ALL_COLUMNS(BFloat16, Max, 2),
    TIERCEL_ALL_COLUMNS(Float16, Sum, 2),  TIERCEL_ALL_COLUMNS(Float16, Max, 2),
};

}  // namespace

const ReduceKernel* reduce_columns_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
