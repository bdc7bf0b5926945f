// SPDX-License-Identifier: Apache-2.0
// softmax for rows that do not fit in the registers of a cluster: the row is read twice. In the
// first pass, each thread keeps the running maximum and sum of its part (the online softmax); the
// second pass, which reads from L2 if the row fits there, computes the results. Moves three times
// the row's bytes forward, five times backward.
#ifndef KERNELS_SOFTMAX_SOFTMAX_LONG_CUH_
#define KERNELS_SOFTMAX_SOFTMAX_LONG_CUH_

#include "kernels/softmax/softmax.cuh"

namespace tiercel {

inline constexpr int kLongVectors = 4;  // per thread and iteration

// Calls `body` for each tile of a row, with `place` moved to it.
template <typename Place, typename Body>
__device__ __forceinline__ void for_each_tile(const Place& start, Body body) {
  Place place = start;
  const int step = kLongVectors * place.stride;
#pragma unroll 1
  for (int columns = place.columns + Place::kPerLine; columns > 0; columns -= step) {
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
  const ScoreReader<Format, kMasked> read(args, start.row);
  float largest = -kInfinity;
  float sum = 0.0f;
  for_each_tile(start, [&](const Place& place) {
    uint32_t words[kLongVectors][4];
    load_row(words, place, args.x, args.pad);
    float x[kLongVectors][Place::kPerVector];
    const float before = largest;
#pragma unroll
    for (int v = 0; v < kLongVectors; ++v) {
      read(words[v], x[v], place, v);
#pragma unroll
      for (int i = 0; i < Place::kPerVector; ++i) largest = fmaxf(largest, x[v][i]);
    }
    // All scores so far are -inf: the sum is 0, not NaN.
    const ExpBelow<kExact> exp_below(largest == -kInfinity ? 0.0f : largest, read.factor);
    float sums[4] = {sum * exp_below(before)};
#pragma unroll
    for (int v = 0; v < kLongVectors; ++v) {
#pragma unroll
      for (int i = 0; i < Place::kPerVector; ++i) sums[i % 4] += exp_below(x[v][i]);
    }
    sum = sum_of(sums);
  });
  grid_dependency_launch();
  group.meet();
  const float most = group.reduce(largest, MaxOf(), 0);
  const ExpBelow<kExact> exp_below(most, read.factor);
  sum = group.reduce(largest == -kInfinity ? sum : sum * exp_below(largest), SumOf(), 1);

  const float last = args.log ? logf(sum) : 1.0f / sum;
  for_each_tile(start, [&](const Place& place) {
    uint32_t words[kLongVectors][4];
    load_row(words, place, args.x, args.pad);
    RowWriter<Format, std::decay_t<decltype(place)>> store(place, args.out);
#pragma unroll
    for (int v = 0; v < kLongVectors; ++v) {
      float x[Place::kPerVector];
      read(words[v], x, place, v);
#pragma unroll
      for (int i = 0; i < Place::kPerVector; ++i) {
        x[i] = args.log ? fmaf(x[i] - most, read.factor, -last)
                        : share_of<kExact>(exp_below(x[i]), sum, last);
      }
      store(v, x);
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
    load_row(y_words, place, args.x, 0.0f);
    load_row(grad_words, place, args.grad, 0.0f);
#pragma unroll
    for (int v = 0; v < kLongVectors; ++v) {
      add_products<Format, Place::kPerVector>(sums, y_words[v], grad_words[v], args.log);
    }
  });
  grid_dependency_launch();
  group.meet();
  const float total = group.reduce(sum_of(sums), SumOf(), 0);
  const char* mask = kMasked ? mask_row(args.mask, start.row) : nullptr;
  for_each_tile(start, [&](const Place& place) {
    uint32_t y_words[kLongVectors][4], grad_words[kLongVectors][4];
    load_row(y_words, place, args.x, 0.0f);
    load_row(grad_words, place, args.grad, 0.0f);
    RowWriter<Format, std::decay_t<decltype(place)>> store(place, args.out);
#pragma unroll
    for (int v = 0; v < kLongVectors; ++v) {
      float y[Place::kPerVector], grad[Place::kPerVector];
      unpack<Format>(y_words[v], y);
      unpack<Format>(grad_words[v], grad);
      const uint32_t keep = kMasked ? mask_bits(args.mask, mask, place, v) : ~0u;
      args.log ? gradients<true, Format::kBytes == 4>(y, grad, total, args.scale, keep)
               : gradients<false, Format::kBytes == 4>(y, grad, total, args.scale, keep);
      store(v, y);
    }
  });
}

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_SOFTMAX_LONG_CUH_
