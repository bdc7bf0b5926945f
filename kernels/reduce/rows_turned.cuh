// SPDX-License-Identifier: Apache-2.0
// reduce along many short rows: as many as a vector a lane.
//
// The plan. A row is kLanes vectors at most, and kLanes lanes read it in one piece; a thread asks
// for its vector of each of kRows rows before it adds any. The lanes' sums meet in steps: in each a
// lane gives away half of its rows and adds what it gets to the others, so that kRows rows take
// about as many shuffles as one lane has rows, and every lane ends with results of its own.
#ifndef KERNELS_REDUCE_ROWS_TURNED_CUH_
#define KERNELS_REDUCE_ROWS_TURNED_CUH_

#include <cstdint>

#include "kernels/reduce/accumulate.cuh"
#include "kernels/reduce/reduce_kernels.h"
#include "kernels/sm90/ahead.h"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

template <typename Format, typename Op, int kLanes, int kUnroll, int kRows>
__global__ void __launch_bounds__(256) reduce_rows_turned(const __grid_constant__ ReduceArgs args) {
  static_assert(kUnroll == 1, "a vector a row and lane");
  constexpr int kGroups = 32 / kLanes;  // of a warp: rows that lie side by side
  const int lane = threadIdx.x % kLanes;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const int64_t first = warp * (kGroups * kRows) + threadIdx.x % 32 / kLanes;
  const int64_t left = args.inner - first;  // rows from the first on
  const int vectors = static_cast<int>(args.length) / (16 / Format::kBytes);
  const bool reads = left > 0 && lane < vectors;
  const char* address = args.x + first * args.inner_stride + lane * 16;
  const int64_t next_row = kGroups * args.inner_stride;
  // By those at the beginning of 32 bytes.
  if (is_ahead(args.ahead) && reads && lane % 2 == 0) {
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
    for (int r = 0; r < kRows; ++r) {  // behind the last row the first one again: no branches
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
  constexpr int kEach = kRows > kLanes ? kRows / kLanes : 1;    // rows that a lane ends with
  constexpr int kShared = kLanes > kRows ? kLanes / kRows : 1;  // lanes that end with one
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
