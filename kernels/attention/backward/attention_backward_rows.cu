// SPDX-License-Identifier: Apache-2.0
// The kernels before and after attention's backward, each reading and writing its tensors once.
//
// prepare: lse and delta of each row, set such that p is 0 for rows that see no key, and zeros in
// the workspace. finish: scales and rounds dq from float32 sums in the layout of the warpgroups'
// accumulators, which shared memory reorders into rows.
#include "kernels/attention/backward/kernels.h"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {
namespace {

constexpr int kThreads = kAttentionBackwardThreads;

struct Place {
  int64_t pair;  // batch entry and head
  int64_t row;   // the block's first
  int64_t end;   // of the rows
  int64_t entry;
  int head;
};

// Returns false for a block without rows; others have up to kRows.
template <int kRows>
__device__ __forceinline__ bool find_place(const AttentionBackwardRowsArgs& args, Place& place) {
  place.pair = blockIdx.x / args.blocks;
  if (args.list != nullptr) {
    const AttentionBackwardBlock block = args.list[blockIdx.x % args.blocks];
    if (block.row >= block.end) return false;
    place.row = block.row;
    place.end = block.end;
  } else {
    place.row = static_cast<int64_t>(blockIdx.x % args.blocks) * kRows;
    place.end = args.rows;
  }
  place.entry = place.pair / args.heads;
  place.head = static_cast<int>(place.pair % args.heads);
  return true;
}

__device__ __forceinline__ char* row_of(const AttentionRows& rows, const Place& place,
                                        int64_t row) {
  const int64_t offset = place.entry * rows.batch_stride + place.head * rows.head_stride +
                         (place.row + row) * rows.row_stride;
  return rows.data + offset * 2;
}

// delta = rowsum(grad * out) - grad_lse, and logarithms of sums to the base 2; infinite where no
// query is or it sees no key, so that its probabilities are 0. Clears the sums of dq.
template <typename Format, int kRows, int kDv>
__global__ void __launch_bounds__(kThreads)
    attention_backward_prepare(const __grid_constant__ AttentionBackwardRowsArgs args) {
  grid_dependency_wait();
  grid_dependency_launch();
  constexpr int kLanes = kDv / 8;  // a row, 16 bytes each
  Place place;
  if (!find_place<kRows>(args, place)) return;
  float* stats = args.stats + static_cast<int64_t>(blockIdx.x) * 2 * kRows;
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int first = 0; first < kRows; first += kThreads / kLanes) {
    const int row = first + threadIdx.x / kLanes;
    const bool there = place.row + row < place.end;
    float sum = 0.0f;
    if (there && lane * 8 < args.d_v) {
      uint32_t out[4], grad[4];
      load_vector(out, row_of(args.out, place, row) + lane * 16);
      load_vector(grad, row_of(args.grad, place, row) + lane * 16);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float a[2], b[2];
        Format::unpack(out[w], a);
        Format::unpack(grad[w], b);
        sum = fmaf(a[0], b[0], fmaf(a[1], b[1], sum));
      }
    }
    sum = lanes_reduce<kLanes>(sum, Sum());
    if (lane == 0) {
      const int64_t at = place.pair * args.rows + place.row + row;
      float lse = -INFINITY;
      if (there) {
        lse = args.lse[at];
        if (args.grad_lse != nullptr) sum -= args.grad_lse[at];
      }
      const bool sees = lse != -INFINITY;
      stats[row] = sees ? lse * kLog2E : INFINITY;
      stats[kRows + row] = sees ? sum : 0.0f;
    }
  }
  const uint32_t zeros[4] = {};
  const int count = kRows * args.tile_d;
  float* sums = args.sums + static_cast<int64_t>(blockIdx.x) * count;
#pragma unroll 8
  for (int i = threadIdx.x * 4; i < count; i += kThreads * 4) {
    store_vector(sums + i, zeros);
  }
  if (args.turns != nullptr && threadIdx.x == 0) args.turns[blockIdx.x] = 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.counter = 0;
}

// The sums of dq are in the order of accumulators of 64 rows, eight columns at a time. A block
// takes kD columns, two times 64 rows or 64; each half of its threads takes half of the sums.
template <typename Format, int kRows, int kD>
__global__ void __launch_bounds__(kThreads)
    attention_backward_finish(const __grid_constant__ AttentionBackwardRowsArgs args) {
  grid_dependency_wait();
  grid_dependency_launch();
  constexpr int kPairs = kD / 2;
  constexpr int kStride = kPairs + 4;  // neighbouring rows in other banks
  __shared__ alignas(16) uint32_t tile[kRows * kStride];
  Place place;
  if (!find_place<kRows>(args, place)) return;
  const int64_t part = static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y;
  const float* sums = args.sums + part * (kRows * kD);
  const int half = threadIdx.x / 128, thread = threadIdx.x % 128;
  constexpr bool kByRows = kRows == 128;
  const int row = (kByRows ? half * 64 : 0) + thread / 32 * 16 + thread % 32 / 4;
  const int column = kByRows ? 0 : half * kPairs / 2;
  constexpr int kChunks = kRows * kD / kThreads / 4;  // of four sums
  uint32_t words[kChunks][4];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    load_vector(words[i], sums + ((half * kChunks + i) * 128 + thread) * 4);
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float pair[2] = {__uint_as_float(words[i][2 * r]) * args.scale,
                             __uint_as_float(words[i][2 * r + 1]) * args.scale};
      tile[(row + 8 * r) * kStride + column + i * 4 + thread % 4] = Format::pack(pair);
    }
  }
  __syncthreads();
  constexpr int kLanes = kD / 8;
  const int lane = threadIdx.x % kLanes;
  const int to = blockIdx.y * kD + lane * 8;
#pragma unroll
  for (int first = 0; first < kRows; first += kThreads / kLanes) {
    const int r = first + threadIdx.x / kLanes;
    if (place.row + r < place.end && to < args.d) {
      uint32_t piece[4];
      load_vector(piece, tile + r * kStride + lane * 4);
      store_vector(row_of(args.dq, place, r) + to * 2, piece);
    }
  }
}

// Tiles of `d` columns of q, whose dq a block finishes `columns` of, and of `d_v` of v.
#define TIERCEL_KERNELS(dtype, m, d, d_v, columns)                                   \
  {DType::k##dtype,                                                                  \
   d,                                                                                \
   d_v,                                                                              \
   m,                                                                                \
   columns,                                                                          \
   Kernel("attention_backward_prepare<" #dtype ", " #m ", " #d_v ">",                \
          reinterpret_cast<const void*>(attention_backward_prepare<dtype, m, d_v>)), \
   Kernel("attention_backward_finish<" #dtype ", " #m ", " #columns ">",             \
          reinterpret_cast<const void*>(attention_backward_finish<dtype, m, columns>))}

const AttentionBackwardRowsKernel kKernels[] = {
    TIERCEL_KERNELS(BFloat16, 128, 64, 64, 64),  TIERCEL_KERNELS(BFloat16, 64, 128, 128, 128),
    TIERCEL_KERNELS(BFloat16, 64, 192, 128, 64), TIERCEL_KERNELS(BFloat16, 64, 256, 256, 64),
    TIERCEL_KERNELS(Float16, 128, 64, 64, 64),   TIERCEL_KERNELS(Float16, 64, 128, 128, 128),
    TIERCEL_KERNELS(Float16, 64, 256, 256, 64)};

}  // namespace

const AttentionBackwardRowsKernel* attention_backward_rows_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
