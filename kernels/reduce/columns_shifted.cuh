// SPDX-License-Identifier: Apache-2.0
// reduce down columns whose rows do not begin at multiples of 16 bytes.
//
// Like reduce_columns.cu, but rows are read in vectors aligned in memory. A row and the row
// kDown * parts below have the same offset from a multiple of 16 bytes, so a thread's vectors cover
// the same columns in all its rows. Only the offsets of a block's rows of threads differ; their
// results are combined by column in shared memory. A strip is one vector narrower than its threads
// read, because each row has a vector that begins before it or ends behind it.
#ifndef KERNELS_REDUCE_COLUMNS_SHIFTED_CUH_
#define KERNELS_REDUCE_COLUMNS_SHIFTED_CUH_

#include <cstdint>

#include "kernels/reduce/accumulate.cuh"
#include "kernels/reduce/reduce_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {

// Loads the vector of columns [column, column + kPlaces) of a row of `columns`. Reads nothing
// outside the tensor; elements of neighbouring rows are not masked.
template <typename Format, typename Op>
__device__ __forceinline__ void load_shifted(uint32_t (&words)[4], const char* address,
                                             const ReduceArgs& args, int column, int columns) {
  if (address >= args.x && address + 16 <= args.end) {
    load_once(words, address);
    return;
  }
  constexpr int kPerWord = 4 / Format::kBytes;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    words[w] = none_of<Format, Op>();
#pragma unroll
    for (int p = 0; p < kPerWord; ++p) {
      const int place = w * kPerWord + p;
      if (static_cast<unsigned>(column + place) >= static_cast<unsigned>(columns)) continue;
      if constexpr (kPerWord == 1) {
        words[w] = *reinterpret_cast<const uint32_t*>(address + place * 4);
      } else {
        const uint32_t element = *reinterpret_cast<const uint16_t*>(address + place * 2);
        words[w] = __byte_perm(words[w], element, p == 0 ? 0x3254 : 0x5410);
      }
    }
  }
}

template <typename Format, typename Op, int kLanes, int kUnroll, int kThreads>
__global__ void __launch_bounds__(kThreads)
    reduce_columns_shifted(const __grid_constant__ ReduceArgs args) {
  constexpr int kPlaces = 16 / Format::kBytes;
  constexpr int kWidest = reduce_shifted_width(kLanes, Format::kBytes);
  constexpr int kDown = kThreads / kLanes;
  static_assert(kDown % kPlaces == 0, "rows a step apart are equally shifted");
  __shared__ float of_rows[kDown][kWidest];

  const int across = threadIdx.x % kLanes, down = threadIdx.x / kLanes;
  const int columns = static_cast<int>(args.inner);
  const int strips = (columns + kWidest - 1) / kWidest;
  const int width = ((columns + strips - 1) / strips + kPlaces - 1) / kPlaces * kPlaces;
  const unsigned split = blockIdx.x % args.parts, rest = blockIdx.x / args.parts;
  const int64_t i = rest / strips;
  const int strip = static_cast<int>(rest % strips) * width;
  const int64_t first = static_cast<int64_t>(split) * kDown + down;
  const int64_t step = static_cast<int64_t>(args.parts) * kDown;
  const int64_t down_stride = step * args.length_stride;
  const char* from = args.x + i * args.outer_stride + first * args.length_stride +
                     static_cast<int64_t>(strip) * Format::kBytes;
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16) / Format::kBytes;
  const int place = across * kPlaces - shift;  // of the thread's first column in the strip
  from += place * Format::kBytes;
  grid_dependency_wait();
  grid_dependency_launch();

  Accumulator<Format, Op> seen;
  seen.clear();
  if (place < width && strip + place < columns) {
    for (int64_t r = first; r < args.length; r += step * kUnroll) {
      uint32_t words[kUnroll][4];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int w = 0; w < 4; ++w) words[u][w] = none_of<Format, Op>();
        if (r + u * step < args.length) {
          load_shifted<Format, Op>(words[u], from + u * down_stride, args, strip + place, columns);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; u += 2) seen.add(words[u], words[u + 1]);
      from += kUnroll * down_stride;
    }
  }
#pragma unroll
  for (int p = 0; p < kPlaces; ++p) {
    if (static_cast<unsigned>(place + p) < static_cast<unsigned>(width)) {
      of_rows[down][place + p] = seen.values[p];
    }
  }
  __syncthreads();

  const int64_t row = split * args.outer + i;  // of the output
  for (int c = threadIdx.x; c < width && strip + c < columns; c += kThreads) {
    float value;
#pragma unroll
    for (int d = 0; d < kDown; d += 4) {
      const float some =
          Op()(Op()(of_rows[d][c], of_rows[d + 1][c]), Op()(of_rows[d + 2][c], of_rows[d + 3][c]));
      value = d == 0 ? some : Op()(value, some);
    }
    store_result(args.out, args.out_dtype, row * args.inner + strip + c, mean_of(value, args));
  }
}

}  // namespace tiercel

#endif  // KERNELS_REDUCE_COLUMNS_SHIFTED_CUH_
