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
#include "kernels/norm/row_sums.cuh"
#include "kernels/norm/teams.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/ring.cuh"

namespace tiercel {

template <typename Format, bool kWide, int kVectors, int kRows, bool kLayerNorm>
__global__ void __launch_bounds__(kWide ? kNormMaxThreads : kNormNarrowThreads, 1)
    norm_backward(const __grid_constant__ NormBackwardArgs args) {
  using Values = Chunk<Format, true>;
  constexpr int kElements = Values::kElements;
  constexpr int kKinds = kLayerNorm ? 2 : 1;
  constexpr NormKind kKind = kLayerNorm ? NormKind::kLayer : NormKind::kRms;
  constexpr bool kHold = norm_backward_holds(Format::kBytes, kVectors, kRows, kKind);
  constexpr bool kKeep = norm_backward_keeps(Format::kBytes, kWide, kVectors, kRows, kKind);
  constexpr int kParts = kElements / 4;
  using Sums = RowSums<kRows, kLayerNorm>;
  extern __shared__ __align__(128) char shared[];
  __shared__ typename Sums::Scratch scratch;
  __shared__ uint64_t full[kNormMaxStages], empty[kNormMaxStages];

  const Team team(args.threads_per_row);
  const int lane = threadIdx.x % 32;
  const int in_warp = lane / team.lanes;
  const int rows_per_warp = 32 / team.lanes;
  const int teams = blockDim.x / 32 / team.warps;
  const int first = team.rank * args.slice;
  const int columns = max(0, min(args.slice, args.columns - first));
  const int chunks = (columns + kElements - 1) / kElements;
  const int part_bytes = args.slice * Format::kBytes;  // of a row, in a stage
  const int rows_at_once = teams * rows_per_warp;      // a thread's rows are so far apart
  const int rows_per_tile = rows_at_once * kRows;      // neighbours: a block's stage is one piece
  const int place_in_tile = team.index * rows_per_warp + in_warp;
  const int stream_bytes = part_bytes * rows_per_tile;
  const int stage_bytes = stream_bytes * args.stream_count;
  const int parts = gridDim.x / team.blocks, part = blockIdx.x / team.blocks;
  // Blocks take tiles in turns: neighbours are read at about the same time, which memory likes.
  const int tiles = ((args.rows + rows_per_tile - 1) / rows_per_tile - part + parts - 1) / parts;
  const auto row_of = [&](int tile) { return (part + tile * parts) * rows_per_tile; };

  char* const ring = shared;
  float* const weight = reinterpret_cast<float*>(shared + args.weight_offset);
  const bool leader = threadIdx.x == 0;
  if (leader) {
#pragma unroll 1
    for (int s = 0; s < args.stages; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], blockDim.x / 32);
    }
    if (team.blocks > 1) Sums::start(scratch);
    mbarrier_init_fence();
  }
  if (team.blocks > 1) cluster_arrive();

  // One thread starts a tile's copies; or, before x may be read, brings it to the L2.
  const auto fetch = [&](int tile, int stage, bool ahead) {
    if (!leader || tile >= tiles || columns == 0) return;
    const int row = row_of(tile);
    const int rows = min(rows_per_tile, args.rows - row);
    const uint32_t bytes = columns * Format::kBytes;
    if (!ahead) mbarrier_expect(&full[stage], bytes * rows * args.stream_count);
#pragma unroll 1
    for (int k = 0; k < args.stream_count; ++k) {
      const char* from = args.streams[k] + int64_t{row} * args.strides[k] + first * Format::kBytes;
      char* to = ring + stage * stage_bytes + k * stream_bytes;
      const bool together = args.strides[k] == part_bytes;
      const int pieces = together ? 1 : rows;
#pragma unroll 1
      for (int r = 0; r < pieces; ++r) {
        const char* piece = from + r * args.strides[k];
        const uint32_t size = together ? bytes * rows : bytes;
        if (ahead) {
          bulk_prefetch(piece, size);
        } else {
          bulk_load(to + r * part_bytes, piece, size, &full[stage]);
        }
      }
    }
  };
#pragma unroll 1
  for (int s = 0; kWide && s < args.stages; ++s) fetch(s, s, true);
  grid_dependency_wait();
#pragma unroll 1
  for (int s = 0; kWide && s < args.stages; ++s) fetch(s, s, false);

  // What it cannot copy, the team's threads do, an element at a time; zeros fill the last vector.
  const auto copy = [&](int tile) {
    const int row = row_of(tile);
#pragma unroll 1
    for (int k = 0; k < args.stream_count; ++k) {
#pragma unroll 1
      for (int r = 0; r < kRows * rows_per_warp; ++r) {
        const int place =
            team.index * rows_per_warp + r % rows_per_warp + r / rows_per_warp * rows_at_once;
        if (row + place >= args.rows) break;
        const char* from = args.streams[k] + int64_t{row + place} * args.strides[k];
        char* to = ring + k * stream_bytes + place * part_bytes;
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
  const auto weight_at = [&](int c) {
    if (args.weight == nullptr || c >= columns) return c < columns ? 1.0f : 0.0f;
    if (args.weight_float32) return reinterpret_cast<const float*>(args.weight)[first + c];
    Chunk<Format, false> one;
    one.load_any(args.weight + (first + c) * Format::kBytes);
    return Format::from_bits(one.words[0]);
  };
  int place = team.place, places = team.places;
  float kept[kKeep ? kVectors : 1][kElements];
  if constexpr (kKeep) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        kept[v][i] = weight_at((v * places + place) * kElements + i);
      }
    }
  } else {
    const bool packed = args.weight != nullptr && !args.weight_float32;
#pragma unroll 1
    for (int c = threadIdx.x; c < (last + 1) * kElements; c += blockDim.x) {
      if (packed && kParts > 1) {
        Chunk<Format, false> one;
        one.clear();
        if (c < columns) one.load_any(args.weight + (first + c) * Format::kBytes);
        one.store(reinterpret_cast<char*>(weight) + c * Format::kBytes);
      } else {
        // The quarters or halves of a vector lie apart, so that neighbours read neighbouring banks.
        weight[(c / 4 % kParts * (last + 1) + c / kElements) * 4 + c % 4] = weight_at(c);
      }
    }
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
  const float warp_columns = alone ? 0.0f : team.warp_columns(kVectors, kElements, columns);
  if (team.blocks > 1) cluster_wait();
  if (kLayerNorm && !alone) {
    Sums::publish(team, scratch, warp_columns);
    if (team.blocks > 1) {
      cluster_arrive();
      cluster_wait();
    }
  }
  __syncthreads();  // barriers and weights are there

  const auto read_weight = [&](float (&w)[kElements], int chunk) {
    if (kParts > 1 && args.weight != nullptr && !args.weight_float32) {
      Values packed;
      packed.load_any(reinterpret_cast<const char*>(weight) + min(chunk, last) * 16);
      packed.unpack(w);
      return;
    }
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      // A vector beyond the row has no gradient: any weight will do.
      const float4 part =
          reinterpret_cast<const float4*>(weight)[p * (last + 1) + min(chunk, last)];
      w[4 * p] = part.x, w[4 * p + 1] = part.y, w[4 * p + 2] = part.z, w[4 * p + 3] = part.w;
    }
  };

  int stage = 0;
  uint32_t phase = 0;  // of the barriers of this tile's stage
  for (int tile = 0; tile < tiles; ++tile) {
    const int row = row_of(tile) + place_in_tile;
    const char* const rows = ring + stage * stage_bytes + place_in_tile * part_bytes;
    const auto real = [&](int r) { return row + r * rows_at_once < args.rows; };
    if constexpr (!kWide) {
      copy(tile);
    } else {
      // The stage of the tile before is free again once all warps have read it.
      if (leader && tile > 0) {
        const int before = stage == 0 ? args.stages - 1 : stage - 1;
        mbarrier_wait(&empty[before], stage == 0 ? phase ^ 1 : phase);
        fetch(tile + args.stages - 1, before, false);
      }
      if (columns > 0) mbarrier_wait(&full[stage], phase);
    }

    Values x[kHold ? kRows : 1][kHold ? kVectors : 1],
        grad[kHold ? kRows : 1][kHold ? kVectors : 1];
    // Calls visit(r, v, chunk, x, weight, gradient) with a vector's values; `again`: they were read
    // before.
    const auto visit_all = [&](bool again, auto visit) {
      asm volatile("" : "+r"(place), "+r"(places));  // offsets are cheaper made again than kept
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int chunk = v * places + place;
          Values& vx = x[kHold ? r : 0][kHold ? v : 0];
          Values& vg = grad[kHold ? r : 0][kHold ? v : 0];
          if (kHold && again) {
            vx.forget();
            vg.forget();
          } else if (!kHold) {
            asm volatile("" ::: "memory");  // one at a time, else registers run out
          }
          if (!kHold || !again) {
            vx.clear();
            vg.clear();
            if (chunk < chunks && real(r)) {
              const char* const from = rows + r * rows_at_once * part_bytes + chunk * 16;
              vx.load_any(from);
              vg.load_any(from + stream_bytes);
            }
          }
          float xs[kElements], gs[kElements];
          vx.unpack(xs);
          vg.unpack(gs);
          if constexpr (kKeep) {
            visit(r, v, chunk, xs, kept[v], gs);
          } else {
            float ws[kElements];
            read_weight(ws, chunk);
            visit(r, v, chunk, xs, ws, gs);
          }
        }
      }
    };

    // Of each row. RMS: the sum of squares of x and that of its products with the weighted
    // gradient. Layer: the sums of distances from a value near the mean, of weighted gradients, of
    // squared distances, of products.
    float sums[kLayerNorm ? 4 : 2][kRows], means[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < (kLayerNorm ? 4 : 2); ++k) sums[k][r] = 0.0f;
      means[r] = 0.0f;
      if constexpr (kLayerNorm) {
        // The mean of the warp's first vector: a mean of some of the row, so that little cancels.
        const int chunk = team.warp * 32;
        if (chunk < chunks && real(r)) {
          Values some;
          some.load_any(rows + r * rows_at_once * part_bytes + chunk * 16);
          float xs[kElements];
          some.unpack(xs);
          float sum = 0.0f;
#pragma unroll
          for (int i = 0; i < kElements; ++i) sum += xs[i];
          const int left = columns - chunk * kElements;
          means[r] = sum / static_cast<float>(kWide ? kElements : min(left, kElements));
        }
      }
    }
    visit_all(false, [&](int r, int, int chunk, const auto& xs, const auto& ws, const auto& gs) {
      if constexpr (kLayerNorm) {
        const int left = columns - chunk * kElements;
        if (left <= 0) return;
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          const float distance = kWide || i < left ? xs[i] - means[r] : 0.0f;
          const float weighted = ws[i] * gs[i];
          sums[0][r] += distance;
          sums[1][r] += weighted;
          sums[2][r] += distance * distance;
          sums[3][r] += distance * weighted;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          sums[0][r] += xs[i] * xs[i];
          sums[1][r] += xs[i] * (ws[i] * gs[i]);
        }
      }
    });
    Sums::add(team, scratch, tile, sums, means);
    float squares[kRows], dots[kRows], totals[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (kLayerNorm) {
        const float distance = sums[0][r] * args.inverse_columns;
        means[r] += distance;
        totals[r] = sums[1][r];
        squares[r] = sums[2][r] - sums[0][r] * distance;
        dots[r] = sums[3][r] - sums[1][r] * distance;
      } else {
        squares[r] = sums[0][r];
        dots[r] = sums[1][r];
        totals[r] = 0.0f;
      }
    }
    __syncwarp();
    const bool read_all = kHold && args.stream_count == 2;
    if (kWide && read_all && lane == 0) mbarrier_arrive(&empty[stage]);

    // grad_x = rstd * (w g - mean(w g) - n mean(w g n)), n = (x - mean) rstd.
    float rstds[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float rstd =
          real(r) ? reciprocal_root(fmaf(squares[r], args.inverse_columns, args.eps)) : 0.0f;
      rstds[r] = rstd;
      dots[r] *= args.inverse_columns * rstd * rstd * rstd;
      totals[r] *= args.inverse_columns * rstd;
    }
    char* const out = args.grad_x + int64_t{row} * args.grad_x_stride + first * Format::kBytes;
    visit_all(true, [&](int r, int v, int chunk, auto& xs, const auto& ws, const auto& gs) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const float distance = kLayerNorm ? xs[i] - means[r] : xs[i];
        const float scaled = gs[i] * rstds[r];
        sum_weight[v][i] += scaled * distance;
        if constexpr (kLayerNorm) sum_bias[v][i] += gs[i];
        xs[i] = ws[i] * scaled - (kLayerNorm ? distance * dots[r] + totals[r] : distance * dots[r]);
      }
      if (chunk < chunks && real(r)) {
        if (args.stream_count == 3) {
          float more[kElements];
          Values values;
          values.load_any(rows + r * rows_at_once * part_bytes + 2 * stream_bytes + chunk * 16);
          values.unpack(more);
#pragma unroll
          for (int i = 0; i < kElements; ++i) xs[i] += more[i];
        }
        char* const to = out + r * rows_at_once * args.grad_x_stride + chunk * 16;
        if constexpr (kWide) {
          Values result;
          result.pack(xs);
          result.store(to);
        } else {
#pragma unroll
          for (int i = 0; i < kElements; ++i) {
            if (chunk * kElements + i < columns) {
              store_element<Format>(to + i * Format::kBytes, xs[i]);
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
    float* const out = args.partial[kind] + static_cast<int64_t>(part) * args.columns + first;
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
