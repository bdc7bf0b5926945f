// SPDX-License-Identifier: Apache-2.0
// reduce along many short rows of at most one vector per lane.
//
// kLanes lanes read a row, at most one vector each. A thread issues the loads of all its kRows rows
// before it adds any. The lanes' sums are combined in steps: in each, a lane sends half of its rows
// and adds the rows that it receives to the other half, so that kRows rows take about kRows
// shuffles and every lane ends with its own results.
#ifndef KERNELS_REDUCE_ROWS_TURNED_CUH_
#define KERNELS_REDUCE_ROWS_TURNED_CUH_

#include <cstdint>

#include "kernels/reduce/accumulate.cuh"
#include "kernels/reduce/reduce_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/prefetch.h"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

template <typename Format, typename Op, int kLanes, int kUnroll, int kRows>
__global__ void __launch_bounds__(256) reduce_rows_turned(const __grid_constant__ ReduceArgs args) {
  static_assert(kUnroll == 1, "a vector a row and lane");
  constexpr int kGroups = 32 / kLanes;  // adjacent rows per warp
  const int lane = threadIdx.x % kLanes;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const int64_t first = warp * (kGroups * kRows) + threadIdx.x % 32 / kLanes;
  const int64_t left = args.inner - first;  // rows from the first on
  const int vectors = static_cast<int>(args.length) / (16 / Format::kBytes);
  const bool reads = left > 0 && lane < vectors;
  const char* address = args.x + first * args.inner_stride + lane * 16;
  const int64_t next_row = kGroups * args.inner_stride;
  // Prefetched by the lanes at the beginning of 32 bytes.
  if (is_prefetching(args.prefetch_blocks) && reads && lane % 2 == 0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r * kGroups < left) prefetch_l2(address + r * next_row);
    }
  }
  grid_dependency_wait();
  grid_dependency_launch();

  uint32_t words[kRows][4];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int w = 0; w < 4; ++w) words[r][w] = none_of<Format, Op>();
  }
  if (reads) {
#pragma unroll
    for (int r = 0; r < kRows;
         ++r) {  // behind the last row, reads the first again, to avoid branches
      load_once(words[r], address + (r * kGroups < left ? r * next_row : 0));
    }
  }
  float sums[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    Accumulator<Format, Op> seen;
    seen.clear();
    seen.add(words[r]);
    sums[r] = seen.total();
  }
  int rows = kRows;
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    const bool upper = (lane & offset) != 0;
    if (rows > 1) {
      rows /= 2;
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        const float kept = upper ? sums[r + rows] : sums[r];
        const float given = upper ? sums[r] : sums[r + rows];
        sums[r] = Op()(kept, __shfl_xor_sync(kFullWarp, given, offset));
      }
    } else {
      sums[0] = Op()(sums[0], __shfl_xor_sync(kFullWarp, sums[0], offset));
    }
  }
  constexpr int kEach = kRows > kLanes ? kRows / kLanes : 1;    // results per lane
  constexpr int kShared = kLanes > kRows ? kLanes / kRows : 1;  // lanes per result
  if (lane % kShared != 0) return;
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const int64_t row = (lane / kShared * kEach + r) * kGroups;
    if (row < left) {
      store_result(args.out, args.out_dtype, first + row, mean_of(sums[r], args));
    }
  }
}

}  // namespace tiercel

#endif  // KERNELS_REDUCE_ROWS_TURNED_CUH_
