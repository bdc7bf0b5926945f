// SPDX-License-Identifier: Apache-2.0
// Gradients of rms_norm and layer_norm. One block a multiprocessor, or a cluster for very long
// rows, goes through the rows in tiles of neighbours, a row a team of threads. The copy engine
// fetches tiles ahead into a ring of stages: full[stage] says that one is there, empty[stage] that
// all warps have read it. The statistics are computed again, which reads nothing more. Each thread
// has its columns of every row, so the parameters' gradients are sums in its registers; they leave
// once, as a row of partial sums a block, which norm_reduce adds up in a fixed order. Bytes: x and
// grad read once, grad_x written once; the floor is those at the speed of a copy.
#ifndef KERNELS_NORM_NORM_BACKWARD_CUH_
#define KERNELS_NORM_NORM_BACKWARD_CUH_

#include <cstdint>

#include "kernels/norm/elements.cuh"
#include "kernels/norm/norm_kernels.h"
#include "kernels/norm/teams.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/ring.cuh"

namespace tiercel {

template <typename Format, bool kWide, int kVectors, bool kLayerNorm>
__global__ void __launch_bounds__(kWide ? kNormMaxThreads : kNormNarrowThreads, 1)
    norm_backward(const __grid_constant__ NormBackwardArgs args) {
  using Values = Chunk<Format, true>;
  constexpr int kElements = Values::kElements;
  // Whether x and grad stay in registers between the two passes: beside the sums there is no room
  // for many.
  constexpr bool kHold = kVectors * (Values::kElements * (kLayerNorm ? 2 : 1) + 8) <= 64;
  // And whether the weight does, all the time.
  constexpr bool kKeep = kWide && kHold && kVectors * (kElements * (kLayerNorm ? 3 : 2) + 8) <= 96;
  constexpr int kParts = kElements / 4;
  constexpr int kKinds = kLayerNorm ? 2 : 1;
  extern __shared__ __align__(128) char shared[];
  __shared__ Team<false>::Scratch scratch;
  __shared__ uint64_t full[kNormMaxStages], empty[kNormMaxStages];

  const Team<false> team(args.threads_per_row);
  const int in_warp = threadIdx.x % 32 / team.lanes;
  const int rows_per_warp = 32 / team.lanes;
  const int teams = blockDim.x / 32 / team.warps;
  const int first = team.rank * args.slice;
  const int columns = max(0, min(args.slice, args.columns - first));
  const int chunks = (columns + kElements - 1) / kElements;
  const int part_bytes = args.slice * Format::kBytes;  // of a row, in a stage
  const int rows_per_tile = teams * rows_per_warp;     // neighbours: a block's stage is one piece
  const int place_in_tile = team.index * rows_per_warp + in_warp;
  const int stream_bytes = part_bytes * rows_per_tile;
  const int stage_bytes = stream_bytes * args.stream_count;
  const int tiles = (args.rows + rows_per_tile - 1) / rows_per_tile;
  const int step = gridDim.x / team.blocks;
  int tile = blockIdx.x / team.blocks;

  char* const ring = shared;
  float* const weight = reinterpret_cast<float*>(shared + args.weight_offset);
  const int lane = threadIdx.x % 32;
  const bool leader = threadIdx.x == 0;
  if (leader) {
#pragma unroll 1
    for (int s = 0; s < args.stages; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], blockDim.x / 32);
    }
    mbarrier_init_fence();
  }
  if (team.blocks > 1) cluster_arrive();
  grid_dependency_wait();

  // One thread starts a tile's copies.
  const auto fetch = [&](int t, int stage) {
    if (!leader || t >= tiles || columns == 0) return;
    const int rows = min(rows_per_tile, args.rows - t * rows_per_tile);
    const uint32_t bytes = columns * Format::kBytes;
    mbarrier_expect(&full[stage], bytes * rows * args.stream_count);
#pragma unroll 1
    for (int k = 0; k < args.stream_count; ++k) {
      const char* from =
          args.streams[k] + int64_t{t * rows_per_tile} * args.strides[k] + first * Format::kBytes;
      char* to = ring + stage * stage_bytes + k * stream_bytes;
      if (args.strides[k] == part_bytes) {
        bulk_load(to, from, bytes * rows, &full[stage]);
      } else {
#pragma unroll 1
        for (int r = 0; r < rows; ++r) {
          bulk_load(to + r * part_bytes, from + r * args.strides[k], bytes, &full[stage]);
        }
      }
    }
  };
#pragma unroll 1
  for (int s = 0; kWide && s < args.stages; ++s) fetch(tile + s * step, s);

  // What it cannot copy, the team's threads do, an element at a time; zeros fill the last vector.
  const auto copy = [&](int t) {
    const int begin = team.index * rows_per_warp;
    const int end = min(begin + rows_per_warp, args.rows - t * rows_per_tile);
#pragma unroll 1
    for (int k = 0; k < args.stream_count; ++k) {
#pragma unroll 1
      for (int r = begin; r < end; ++r) {
        const char* from = args.streams[k] + int64_t{t * rows_per_tile + r} * args.strides[k];
        char* to = ring + k * stream_bytes + r * part_bytes;
#pragma unroll 4
        for (int c = team.warp * 32 + lane; c < chunks * kElements; c += team.warps * 32) {
          Chunk<Format, false> one;
          one.clear();
          if (c < columns) one.load_any(from + static_cast<int64_t>(first + c) * args.inner[k]);
          one.store(to + c * Format::kBytes);
        }
      }
    }
    team.sync();
  };

  // The weight as float32, ones where there is none.
  const int last = max(chunks - 1, 0);
#pragma unroll 1
  for (int c = threadIdx.x; c < (last + 1) * kElements; c += blockDim.x) {
    float value = c < columns ? 1.0f : 0.0f;
    if (args.weight != nullptr && c < columns) {
      if (args.weight_float32) {
        value = reinterpret_cast<const float*>(args.weight)[first + c];
      } else {
        Chunk<Format, false> one;
        one.load_any(args.weight + (first + c) * Format::kBytes);
        value = Format::from_bits(one.words[0]);
      }
    }
    // The quarters or halves of a vector lie apart, so that neighbours read neighbouring banks.
    weight[(c / 4 % kParts * (last + 1) + c / kElements) * 4 + c % 4] = value;
  }

  float sum_weight[kVectors][kElements];
  float sum_bias[kLayerNorm ? kVectors : 1][kElements];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      sum_weight[v][i] = 0.0f;
      if constexpr (kLayerNorm) sum_bias[v][i] = 0.0f;
    }
  }

  const bool alone = team.entries() == 1;
  const float warp_columns =
      alone ? static_cast<float>(args.columns) : team.warp_columns(kVectors, kElements, columns);
  const float inverse_warp_columns = 1.0f / fmaxf(warp_columns, 1.0f);
  if (team.blocks > 1) cluster_wait();
  if (kLayerNorm && !alone) team.publish(scratch, warp_columns);
  __syncthreads();  // barriers and weights are there

  const auto read_weight = [&](float (&w)[kElements], int chunk) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      // A vector beyond the row has no gradient: any weight will do.
      const float4 part =
          reinterpret_cast<const float4*>(weight)[p * (last + 1) + min(chunk, last)];
      w[4 * p] = part.x, w[4 * p + 1] = part.y, w[4 * p + 2] = part.z, w[4 * p + 3] = part.w;
    }
  };
  float kept[kKeep ? kVectors : 1][kElements];
  if constexpr (kKeep) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) read_weight(kept[v], v * team.places + team.place);
  }

  int stage = 0;
  uint32_t phase = 0;  // of the barriers of this tile's stage
  int place = team.place, places = team.places;
  for (int parity = 0; tile < tiles; tile += step, parity ^= 1) {
    const int row = tile * rows_per_tile + place_in_tile;
    const bool real = row < args.rows;
    const char* const rows = ring + stage * stage_bytes + place_in_tile * part_bytes;
    if constexpr (!kWide) {
      copy(tile);
    } else {
      // The stage of the tile before is free again once all warps have read it.
      if (leader && tile >= step) {
        const int before = stage == 0 ? args.stages - 1 : stage - 1;
        mbarrier_wait(&empty[before], stage == 0 ? phase ^ 1 : phase);
        fetch(tile + (args.stages - 1) * step, before);
      }
      if (columns > 0) mbarrier_wait(&full[stage], phase);
    }

    Values x[kHold ? kVectors : 1], grad[kHold ? kVectors : 1];
    // Calls visit(v, chunk, x, weighted gradient, gradient) with a vector's values; `again`: they
    // were read before.
    const auto visit_all = [&](bool again, auto visit) {
      asm volatile("" : "+r"(place), "+r"(places));  // offsets are cheaper made again than kept
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int chunk = v * places + place;
        Values& vx = x[kHold ? v : 0];
        Values& vg = grad[kHold ? v : 0];
        if (kHold && again) {
          vx.forget();
          vg.forget();
        } else {
          if (!kHold) asm volatile("" ::: "memory");  // one at a time, else registers run out
          vx.clear();
          vg.clear();
          if (chunk < chunks && real) {
            vx.load_any(rows + chunk * 16);
            vg.load_any(rows + stream_bytes + chunk * 16);
          }
        }
        float xs[kElements], gs[kElements];
        vx.unpack(xs);
        vg.unpack(gs);
        if constexpr (kKeep) {
          visit(v, chunk, xs, kept[v], gs);
        } else {
          float ws[kElements];
          read_weight(ws, chunk);
          visit(v, chunk, xs, ws, gs);
        }
      }
    };

    float mean = 0.0f, square = 0.0f;  // of x; the sum of its squared distances from the mean
    float dot = 0.0f, total = 0.0f;    // of weighted gradient with those distances; of the former
    if constexpr (!kLayerNorm) {
      visit_all(false, [&](int, int, const auto& xs, const auto& ws, const auto& gs) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          square += xs[i] * xs[i];
          dot += xs[i] * (ws[i] * gs[i]);
        }
      });
      const float2 sums = team.sum(scratch, parity, square, dot);
      square = sums.x;
      dot = sums.y;
    } else {
      visit_all(false, [&](int, int, const auto& xs, const auto& ws, const auto& gs) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          mean += xs[i];
          total += ws[i] * gs[i];
        }
      });
      mean = lanes_sum(mean, team.lanes) * inverse_warp_columns;
      total = lanes_sum(total, team.lanes);
      visit_all(true, [&](int, int chunk, const auto& xs, const auto& ws, const auto& gs) {
        const int left = columns - chunk * kElements;
        if (left <= 0) return;
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          const float distance = kWide || i < left ? xs[i] - mean : 0.0f;
          square += distance * distance;
          dot += distance * (ws[i] * gs[i]);
        }
      });
      square = lanes_sum(square, team.lanes);
      dot = lanes_sum(dot, team.lanes);
      if (alone) {
        __syncwarp();
      } else {
        // Chan's formula, for squares and products: the parts are about their own means.
        team.exchange(scratch, parity, make_float4(mean, square, total, dot));
        float sum = 0.0f;
        total = 0.0f;
#pragma unroll 1
        for (int i = lane; i < team.entries(); i += 32) {
          const float4 part = team.entry(scratch, parity, i);
          sum += part.x * team.count(scratch, i);
          total += part.z;
        }
        mean = lanes_reduce<32>(sum, Sum()) * args.inverse_columns;
        total = lanes_reduce<32>(total, Sum());
        square = dot = 0.0f;
#pragma unroll 1
        for (int i = lane; i < team.entries(); i += 32) {
          const float4 part = team.entry(scratch, parity, i);
          const float distance = part.x - mean;
          square += part.y + team.count(scratch, i) * distance * distance;
          dot += part.w + part.z * distance;
        }
        square = lanes_reduce<32>(square, Sum());
        dot = lanes_reduce<32>(dot, Sum());
      }
    }
    const bool read_all = kHold && args.stream_count == 2;
    if (kWide && read_all && lane == 0) mbarrier_arrive(&empty[stage]);

    const float rstd = real ? reciprocal_root(fmaf(square, args.inverse_columns, args.eps)) : 0.0f;
    // grad_x = rstd * (w g - mean(w g) - n mean(w g n)), n = (x - mean) rstd.
    const float slope = dot * args.inverse_columns * rstd * rstd * rstd;
    const float offset = total * args.inverse_columns * rstd;
    char* const out = args.grad_x + int64_t{row} * args.grad_x_stride + first * Format::kBytes;
    visit_all(true, [&](int v, int chunk, auto& xs, const auto& ws, const auto& gs) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const float distance = kLayerNorm ? xs[i] - mean : xs[i];
        const float scaled = gs[i] * rstd;
        sum_weight[v][i] += scaled * distance;
        if constexpr (kLayerNorm) sum_bias[v][i] += gs[i];
        xs[i] = ws[i] * scaled - (kLayerNorm ? distance * slope + offset : distance * slope);
      }
      if (chunk < chunks && real) {
        if (args.stream_count == 3) {
          float more[kElements];
          Values values;
          values.load_any(rows + 2 * stream_bytes + chunk * 16);
          values.unpack(more);
#pragma unroll
          for (int i = 0; i < kElements; ++i) xs[i] += more[i];
        }
        if constexpr (kWide) {
          Values result;
          result.pack(xs);
          result.store(out + chunk * 16);
        } else {
#pragma unroll
          for (int i = 0; i < kElements; ++i) {
            if (chunk * kElements + i < columns) {
              store_element<Format>(out + chunk * 16 + i * Format::kBytes, xs[i]);
            }
          }
        }
      }
    });
    if constexpr (!kWide) {
      team.sync();
    } else if (!read_all) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&empty[stage]);
    }
    if (++stage == args.stages) {
      stage = 0;
      phase ^= 1;
    }
  }

  if (args.partial[0] == nullptr && args.partial[1] == nullptr) return;
  // Sums over the block's teams, in the ring's memory; every team has the same columns.
#pragma unroll 1
  for (int offset = team.lanes; offset < 32; offset *= 2) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        sum_weight[v][i] += __shfl_xor_sync(kFullWarp, sum_weight[v][i], offset);
        if constexpr (kLayerNorm) {
          sum_bias[v][i] += __shfl_xor_sync(kFullWarp, sum_bias[v][i], offset);
        }
      }
    }
  }
#pragma unroll
  for (int kind = 0; kind < kKinds; ++kind) {
    if (args.partial[kind] == nullptr) continue;
    float* const sums = reinterpret_cast<float*>(shared);
    __syncthreads();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int chunk = v * places + place;
      if (chunk >= chunks || in_warp > 0) continue;
      float4* to = reinterpret_cast<float4*>(sums + team.index * args.slice + chunk * kElements);
#pragma unroll
      for (int p = 0; p < kElements / 4; ++p) {
        const auto& from = kind == 0 ? sum_weight[v] : sum_bias[kLayerNorm ? v : 0];
        to[p] = make_float4(from[4 * p], from[4 * p + 1], from[4 * p + 2], from[4 * p + 3]);
      }
    }
    __syncthreads();
    float* const out =
        args.partial[kind] + static_cast<int64_t>(blockIdx.x / team.blocks) * args.columns + first;
#pragma unroll 1
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
      float sum = 0.0f;
      for (int t = 0; t < teams; ++t) sum += sums[t * args.slice + c];
      out[c] = sum;
    }
  }
  grid_dependency_launch();
}

// Adds up the blocks' sums: a warp's lanes take neighbouring columns, its warps every eighth part.
template <typename Format>
__global__ void __launch_bounds__(kNormReduceThreads)
    norm_reduce(const __grid_constant__ NormReduceArgs args) {
  constexpr int kWarps = kNormReduceThreads / 32;
  __shared__ float sums[kWarps][32];
  const int kind = blockIdx.y;
  const int column = blockIdx.x * 32 + threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  grid_dependency_wait();
  grid_dependency_launch();
  if (args.out[kind] == nullptr) return;
  float sum = 0.0f;
  if (column < args.columns) {
    const float* from = args.partial[kind] + column;
#pragma unroll 8
    for (int part = warp; part < args.parts; part += kWarps) {
      sum += from[static_cast<int64_t>(part) * args.columns];
    }
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

#endif  // KERNELS_NORM_NORM_BACKWARD_CUH_
