// SPDX-License-Identifier: Apache-2.0
// softmax for rows that do not fit into the registers of a cluster: the row is read twice. The first
// time each thread keeps the running maximum and sum of its part (the online softmax), the second
// time, from the L2 cache where the row fits there, the results are made. Bytes: three times the
// row's forward, five times backward.
#ifndef KERNELS_SOFTMAX_SOFTMAX_LONG_CUH_
#define KERNELS_SOFTMAX_SOFTMAX_LONG_CUH_

#include "kernels/softmax/softmax.cuh"

namespace tiercel {

inline constexpr int kLongVectors = 4;  // a thread, at a time

// Calls `body` for each tile of a row, with `place` there.
template <typename Place, typename Body>
__device__ __forceinline__ void for_each_tile(const Place& start, Body body) {
  Place place = start;
  const int step = kLongVectors * place.stride;
#pragma unroll 1
  for (int columns = place.columns + Place::kPerVector; columns > 0; columns -= step) {
    body(place);
    place.first += step;
  }
}

template <typename Format, bool kMasked>
__global__ void __launch_bounds__(kSoftmaxThreads, 1)
    softmax_long_forward(const __grid_constant__ SoftmaxArgs args) {
  constexpr bool kExact = Format::kBytes == 4;
  using Place = RowPlace<Format, BlockGroup>;
  const BlockGroup group(args.blocks);
  grid_dependency_wait();

  const Place start(args, group);
  const char* mask = kMasked ? mask_row(args.mask, start.row) : nullptr;
  const MergeSums<kExact> merge;
  float2 total = make_float2(-kInfinity, 0.0f);
  for_each_tile(start, [&](const Place& place) {
    uint32_t words[kLongVectors][4];
    load_row(words, place, args.x, args.pad);
    float x[kLongVectors][Place::kPerVector];
    float largest = -kInfinity;
#pragma unroll
    for (int v = 0; v < kLongVectors; ++v) {
      scores_of<kMasked>(words[v], x[v], args, mask, place, v);
#pragma unroll
      for (int i = 0; i < Place::kPerVector; ++i) largest = fmaxf(largest, x[v][i]);
    }
    const float base = largest == -kInfinity ? 0.0f : largest;
    float sums[4] = {};
#pragma unroll
    for (int v = 0; v < kLongVectors; ++v) {
#pragma unroll
      for (int i = 0; i < Place::kPerVector; ++i) sums[i % 4] += exp_of<kExact>(x[v][i] - base);
    }
    total = merge(total, make_float2(largest, (sums[0] + sums[1]) + (sums[2] + sums[3])));
  });
  grid_dependency_launch();
  total = group.far(BlockGroup::all_lanes(total, merge), make_float2(-kInfinity, 0.0f), merge);

  const float last = last_factor(total.y, args.log);
  for_each_tile(start, [&](const Place& place) {
    uint32_t words[kLongVectors][4];
    load_row(words, place, args.x, args.pad);
#pragma unroll
    for (int v = 0; v < kLongVectors; ++v) {
      float x[Place::kPerVector];
      scores_of<kMasked>(words[v], x, args, mask, place, v);
      finish<Format>(x, total, last, args.log);
      store_row<Format>(x, place, args.out, v);
    }
  });
}

template <typename Format, bool kMasked>
__global__ void __launch_bounds__(kSoftmaxThreads, 1)
    softmax_long_backward(const __grid_constant__ SoftmaxArgs args) {
  using Place = RowPlace<Format, BlockGroup>;
  const BlockGroup group(args.blocks);
  grid_dependency_wait();

  const Place start(args, group);
  float sums[4] = {};
  for_each_tile(start, [&](const Place& place) {
    uint32_t y_words[kLongVectors][4], grad_words[kLongVectors][4];
    if (!args.log) load_row(y_words, place, args.x, 0.0f);
    load_row(grad_words, place, args.grad, 0.0f);
#pragma unroll
    for (int v = 0; v < kLongVectors; ++v) {
      float y[Place::kPerVector], grad[Place::kPerVector];
      unpack<Format>(y_words[v], y);
      unpack<Format>(grad_words[v], grad);
#pragma unroll
      for (int i = 0; i < Place::kPerVector; ++i) {
        sums[i % 4] = args.log ? sums[i % 4] + grad[i] : fmaf(grad[i], y[i], sums[i % 4]);
      }
    }
  });
  grid_dependency_launch();
  const float sum = group.near((sums[0] + sums[1]) + (sums[2] + sums[3]), Sum());
  const float total = group.far(make_float2(sum, 0.0f), make_float2(0.0f, 0.0f), MergeFirst()).x;
  const char* mask = kMasked ? mask_row(args.mask, start.row) : nullptr;
  for_each_tile(start, [&](const Place& place) {
    uint32_t y_words[kLongVectors][4], grad_words[kLongVectors][4];
    load_row(y_words, place, args.x, 0.0f);
    load_row(grad_words, place, args.grad, 0.0f);
#pragma unroll
    for (int v = 0; v < kLongVectors; ++v) {
      float y[Place::kPerVector], grad[Place::kPerVector];
      unpack<Format>(y_words[v], y);
      unpack<Format>(grad_words[v], grad);
      gradients<kMasked>(y, grad, total, args, mask, place, v);
      store_row<Format>(y, place, args.out, v);
    }
  });
}

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_SOFTMAX_LONG_CUH_
