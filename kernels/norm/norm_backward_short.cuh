// SPDX-License-Identifier: Apache-2.0
// Gradients of layer_norm for short 16-bit rows.
//
// Plan: one warp per row of 32 * (kVectors - 1) + 1 to 32 * kVectors 16-byte vectors. As in
// norm_backward, one block per multiprocessor walks over tiles of neighbouring rows, each warp has
// a ring of stages that TMA bulk copies fill, and the parameters' gradients accumulate in registers
// until norm_reduce adds the blocks' partial sums. Such rows are near the issue limit. Therefore
// the results of the first pass (distances from a value near the mean, grad as float32, its product
// with the weight) stay in registers for the second, and addresses advance from row to row: about
// 15 instructions per element and 100 per row.
//
// Lower bound: x and grad read once, grad_x written once, at the speed of a copy.
#ifndef KERNELS_NORM_NORM_BACKWARD_SHORT_CUH_
#define KERNELS_NORM_NORM_BACKWARD_SHORT_CUH_

#include <cstdint>

#include "kernels/norm/elements.cuh"
#include "kernels/norm/norm_kernels.h"
#include "kernels/norm/norm_reduce.cuh"
#include "kernels/norm/row_sums.cuh"
#include "kernels/norm/row_tiles.cuh"
#include "kernels/norm/teams.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/tma.cuh"

namespace tiercel {

template <typename Format, int kVectors>
__global__ void __launch_bounds__(norm_backward_short_threads(kVectors), 1)
    norm_backward_short(const __grid_constant__ NormBackwardArgs args) {
  using Values = Chunk<Format, true>;
  constexpr int kElements = Values::kElements;
  constexpr int kApart = 32 * 16;  // bytes between a lane's vectors
  // Keep the products of grad and weight in registers, too. With four vectors, 12 warps have no
  // room for them.
  constexpr bool kHold = kVectors < 4;
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t full[kNormMaxWarps * kNormMaxStages];

  const Team team(32);
  const int lane = team.place, warp = team.index, warps = blockDim.x / 32;
  const int columns = args.columns;
  const int chunks = columns / kElements;
  const RowTiles<true> tiles(args, team, 1, warps);
  const bool has_last = tiles.count > 0 && tiles.first_row(tiles.count - 1) < tiles.end;
  const int count = tiles.count - (has_last ? 0 : 1);  // the warp's rows

  const int pitch = columns * Format::kBytes, stage_bytes = 2 * pitch;
  char* const ring = shared + warp * args.stages * stage_bytes;
  uint64_t* const arrived = full + warp * args.stages;
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < args.stages; ++s) mbarrier_init(&arrived[s], 1);
    mbarrier_init_fence();
  }
  __syncwarp();

  // The weight is 16-byte aligned, or there is none. Loaded before the rows: behind them it would
  // arrive microseconds later.
  const int weight_bytes = args.weight_float32 ? 4 : Format::kBytes;
  if (threadIdx.x == 0 && args.weight != nullptr) {
    bulk_prefetch(args.weight, columns * weight_bytes);
  }
#pragma unroll 1
  for (int i = 0; i < min(args.prefetch_rows, count); ++i) {
    const int64_t row = tiles.first_row(i);
    elected_prefetch(args.streams[0] + row * args.strides[0], pitch);
    elected_prefetch(args.streams[1] + row * args.strides[1], pitch);
  }
  grid_dependency_launch();
  grid_dependency_wait();

  uint32_t asked[2][4] = {};
  const auto ask = [&](int chunk) {
    if (args.weight == nullptr || chunk >= chunks) return;
    const char* const at = args.weight + chunk * kElements * weight_bytes;
    load_vector(asked[0], at);
    if (args.weight_float32) load_vector(asked[1], at + 16);
  };
  ask(threadIdx.x);
  uint32_t stage_at = shared_address(ring), barrier = shared_address(arrived);
  RowPointers<2> from(args.streams, args.strides, args, tiles);
#pragma unroll 1
  for (int i = 0; i < min(args.stages, count); ++i) {
    from.come_to(i);
    elected_load_pair(stage_at + i * stage_bytes, from.at(0), stage_at + i * stage_bytes + pitch,
                      from.at(1), pitch, barrier + i * 8);
    from.step();
  }

  // Stored as float32, with the halves of a vector apart: neighbouring lanes read neighbouring
  // banks.
  float* const weight = reinterpret_cast<float*>(shared + args.weight_offset);
#pragma unroll 1
  for (int c = threadIdx.x; c < kVectors * 32; c += blockDim.x) {
    if (c >= static_cast<int>(blockDim.x)) ask(c);
    float some[kElements];
    Values packed;
#pragma unroll
    for (int i = 0; i < 4; ++i) packed.words[i] = asked[0][i];
    packed.unpack(some);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = args.weight_float32 ? asked[p][i] : __float_as_uint(some[4 * p + i]);
        if (args.weight == nullptr) words[i] = __float_as_uint(1.0f);
      }
      store_vector(weight + (p * kVectors * 32 + c) * 4, words);
    }
  }
  const uint32_t weight_at = shared_address(weight) + lane * 16;
  __syncthreads();

  float gradients[2][kVectors][kElements] = {};             // of weight and bias
  const bool inside = (kVectors - 1) * 32 + lane < chunks;  // all vectors but the last always are
  RowPointers<1> out(&args.grad_x, &args.grad_x_stride, args, tiles);
  const uint32_t middle = chunks / 2 * 16, last = (chunks - 1) * 16;
  const auto read_weight = [&](float (&w)[kElements], int v) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      uint32_t part[4];
      load_shared(part, weight_at + (p * kVectors + v) * kApart);
#pragma unroll
      for (int k = 0; k < 4; ++k) w[4 * p + k] = __uint_as_float(part[k]);
    }
  };
  int stage = 0;
  uint32_t phase = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    mbarrier_wait(barrier, phase);
    uint32_t first_word, middle_word, last_word;
    load_shared(first_word, stage_at);
    load_shared(middle_word, stage_at + middle);
    load_shared(last_word, stage_at + last);
    const float guess = middle_of(Format::from_bits(first_word), Format::from_bits(middle_word),
                                  Format::from_bits(last_word));

    float distances[kVectors][kElements], grads[kVectors][kElements];
    float products[kHold ? kVectors : 1][kElements];
    // Sums of distances, weighted gradients, squared distances, products.
    float sums[4] = {};
    const uint32_t at = stage_at + lane * 16;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Values x, grad;
      if (v < kVectors - 1 || inside) {
        load_shared(x.words, at + v * kApart);
        load_shared(grad.words, at + pitch + v * kApart);
      } else {
        x.fill(guess);
        grad.clear();
      }
      x.unpack(distances[v]);
      grad.unpack(grads[v]);
      float w[kElements];
      read_weight(w, v);
#pragma unroll
      for (int k = 0; k < kElements; ++k) {
        const float distance = distances[v][k] - guess;
        const float product = w[k] * grads[v][k];
        distances[v][k] = distance;
        if constexpr (kHold) products[v][k] = product;
        sums[0] += distance;
        sums[1] += product;
        sums[2] += distance * distance;
        sums[3] += distance * product;
      }
    }
    const float held = lanes_scatter(sums, 32);  // also: all lanes have read the stage
#pragma unroll
    for (int k = 0; k < 4; ++k) sums[k] = __shfl_sync(kFullWarp, held, k);
    __syncwarp();
    if (i + args.stages < count) {
      from.come_to(i + args.stages);
      elected_load_pair(stage_at, from.at(0), stage_at + pitch, from.at(1), pitch, barrier);
      from.step();
    }
    stage_at += stage_bytes;
    barrier += 8;
    if (++stage == args.stages) {
      stage_at -= args.stages * stage_bytes;
      barrier -= args.stages * 8;
      stage = 0;
      phase ^= 1;
    }

    // grad_x = rstd * (w g - mean(w g) - n mean(w g n)), n = (x - mean) rstd.
    const float mean = sums[0] * args.inverse_columns;  // as a distance from the guess
    const float square = sums[2] - sums[0] * mean;
    const float rstd = reciprocal_root(fmaf(square, args.inverse_columns, args.eps));
    const float shift = -mean * rstd;
    const float share = args.inverse_columns * rstd;
    const float total = sums[1] * share;
    const float dot = (sums[3] - sums[1] * mean) * share * rstd;
    out.come_to(i);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float w[kElements], result[kElements];
      if constexpr (!kHold) read_weight(w, v);
#pragma unroll
      for (int k = 0; k < kElements; ++k) {
        const float product = kHold ? products[kHold ? v : 0][k] : w[k] * grads[v][k];
        const float standard = fmaf(distances[v][k], rstd, shift);
        gradients[0][v][k] += grads[v][k] * standard;
        gradients[1][v][k] += grads[v][k];
        result[k] = fmaf(product, rstd, -fmaf(standard, dot, total));
      }
      if (v < kVectors - 1 || inside) {
        Values packed;
        packed.pack(result);
        packed.store(const_cast<char*>(out.at(0)) + lane * 16 + v * kApart);
      }
    }
    out.step();
  }

  if (args.partial[0] == nullptr && args.partial[1] == nullptr) return;
  float* to[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    to[k] = args.partial[k];
    if (to[k] != nullptr) to[k] += int64_t{tiles.part} * columns;
  }
  leave_sums<true>(gradients, team, 32, reinterpret_cast<float*>(shared),
                   args.stages * stage_bytes / 4, columns, columns, to);
}

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_BACKWARD_SHORT_CUH_
