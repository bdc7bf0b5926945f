// SPDX-License-Identifier: Apache-2.0
// Gradients of rms_norm and layer_norm. One block a multiprocessor, or a cluster for very long
// rows, goes through the rows in tiles of neighbours, a row a team of threads. The copy engine
// fetches rows ahead into a ring of stages that each team has of its own, so that teams need not
// wait for each other; an mbarrier a stage says that its row is there, and the last warp to have
// read one has it filled again. The statistics are computed again, which reads nothing more. A row
// takes two passes with its sums between them; the next row's first pass comes before the second
// one of this, so that no warp waits for the sums of the others. Each thread has its columns of
// every row, so the parameters' gradients are sums in its registers; they leave once, as a row of
// partial sums a block, which norm_reduce adds up in a fixed order. Bytes: x and grad read once,
// grad_x written once; the floor is those at the speed of a copy.
#ifndef KERNELS_NORM_NORM_BACKWARD_CUH_
#define KERNELS_NORM_NORM_BACKWARD_CUH_

#include <cstdint>

#include "kernels/norm/elements.cuh"
#include "kernels/norm/norm_kernels.h"
#include "kernels/norm/norm_reduce.cuh"
#include "kernels/norm/row_sums.cuh"
#include "kernels/norm/teams.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/ring.cuh"

namespace tiercel {

// Counts in shared memory from 0 to `last` and round; returns the count before. What the callers
// before have read is read.
__device__ __forceinline__ uint32_t count_shared(uint32_t* counter, uint32_t last) {
  uint32_t count;
  asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], %2;"
               : "=r"(count)
               : "r"(shared_address(counter)), "r"(last)
               : "memory");
  return count;
}

// kPartial: parts of a warp have a row, else whole warps; where rows are not on 16 bytes, either.
template <typename Format, bool kWide, int kVectors, bool kPartialWarps, bool kLayerNorm>
__global__ void __launch_bounds__(kWide ? kNormMaxThreads : kNormNarrowThreads, 1)
    norm_backward(const __grid_constant__ NormBackwardArgs args) {
  using Values = Chunk<Format, true>;
  constexpr int kElements = Values::kElements;
  constexpr int kKinds = kLayerNorm ? 2 : 1;
  constexpr NormKind kKind = kLayerNorm ? NormKind::kLayer : NormKind::kRms;
  constexpr bool kKeep = norm_backward_keeps(Format::kBytes, kWide, kVectors, kKind);
  constexpr int kParts = kElements / 4;
  constexpr bool kPartial = !kWide || kPartialWarps;
  constexpr bool kShared = !kWide || !kPartialWarps;
  constexpr int kSums = kLayerNorm ? 4 : 2;
  using Sums = RowSums<kSums, kPartial, kShared>;
  extern __shared__ __align__(128) char shared[];
  __shared__ typename Sums::Scratch scratch;
  __shared__ uint64_t full[kNormMaxWarps * kNormMaxStages];
  // A team's warps that are done with a row, and with the next one: none is two rows ahead.
  __shared__ uint32_t done[kNormMaxWarps][2];
  __shared__ __align__(16) char pivots[kNormMaxStages][3][16];

  const Team team(args.threads_per_row);
  const int lane = threadIdx.x % 32;
  const int in_warp = kPartial ? lane / team.lanes : 0;
  const int rows_per_warp = kPartial ? 32 / team.lanes : 1;
  const int teams = blockDim.x / 32 / team.warps;
  const int place = team.place, places = team.places;
  const int first = team.rank * args.slice;
  const int columns = max(0, min(args.slice, args.columns - first));
  const int chunks = (columns + kElements - 1) / kElements;
  const int parts = gridDim.x / team.blocks, part = blockIdx.x / team.blocks;
  // Blocks take tiles in turns: neighbours are read at about the same time, which memory likes.
  const int first_row = (part * teams + team.index) * rows_per_warp;
  const int row_step = parts * teams * rows_per_warp;
  const int tiles = max(0, (args.rows - first_row + row_step - 1) / row_step);  // the team's
  // A team has a ring of its own, whose stages have a row each, or one for each part of a warp.
  const int pitch = args.slice * Format::kBytes;
  const int stream_bytes = pitch * rows_per_warp;
  const int stage_bytes = stream_bytes * args.stream_count;
  const bool clustered = kShared && team.blocks > 1;
  const int vectors = (args.columns + kElements - 1) / kElements;

  char* const ring = shared + team.index * args.stages * stage_bytes;
  uint64_t* const arrived = full + team.index * args.stages;
  float* const weight = reinterpret_cast<float*>(shared + args.weight_offset);
  const bool leader = team.warp == 0 && lane == 0;
  if (leader) {
    if constexpr (kWide) {
#pragma unroll 1
      for (int s = 0; s < args.stages; ++s) mbarrier_init(&arrived[s], 1);
      done[team.index][0] = done[team.index][1] = 0;
    }
    Sums::start(team, scratch);
    mbarrier_init_fence();
  }
  if (clustered) cluster_arrive();

  // One thread starts the copies of the team's tile of that number; or, before x may be read,
  // brings it to the L2.
  const auto fetch = [&](int tile, int stage, bool ahead) {
    if (tile >= tiles) return;
    const int row = first_row + tile * row_step;
    const int rows = kPartial ? min(rows_per_warp, args.rows - row) : 1;
    const uint32_t bytes = columns * Format::kBytes;
    const bool guess = kLayerNorm && clustered;  // of the mean: other blocks' columns
    if (!ahead) {
      mbarrier_expect(&arrived[stage], bytes * rows * args.stream_count + (guess ? 48 : 0));
    }
    if (bytes > 0) {
#pragma unroll 1
      for (int k = 0; k < args.stream_count; ++k) {
        const char* from =
            args.streams[k] + int64_t{row} * args.strides[k] + first * Format::kBytes;
        char* to = ring + stage * stage_bytes + k * stream_bytes;
        const bool together = !kPartial || args.strides[k] == pitch;
        const int pieces = together ? 1 : rows;
        const uint32_t size = together ? bytes * rows : bytes;
#pragma unroll 1
        for (int i = 0; i < pieces; ++i, from += args.strides[k], to += pitch) {
          if (ahead) {
            bulk_prefetch(from, size);
          } else {
            bulk_load(to, from, size, &arrived[stage]);
          }
        }
      }
    }
    if constexpr (kLayerNorm && kShared) {
      if (!guess || ahead) return;
#pragma unroll 1
      for (int i = 0; i < 3; ++i) {
        const int vector = i == 0 ? 0 : i == 1 ? vectors / 2 : vectors - 1;
        bulk_load(pivots[stage][i], args.streams[0] + int64_t{row} * args.strides[0] + vector * 16,
                  16, &arrived[stage]);
      }
    }
  };
  const auto fetch_first = [&](bool ahead) {
    if constexpr (kWide) {
      if (!leader) return;
#pragma unroll 1
      for (int s = 0; s < args.stages; ++s) fetch(s, s, ahead);
    }
  };
  fetch_first(true);
  grid_dependency_wait();
  grid_dependency_launch();  // norm_reduce finds room beside, and waits there
  fetch_first(false);

  // What it cannot copy, the team's threads do, an element at a time; zeros fill the last vector.
  const auto copy = [&](int tile) {
    const int row = first_row + tile * row_step;
#pragma unroll 1
    for (int k = 0; k < args.stream_count; ++k) {
#pragma unroll 1
      for (int r = 0; r < rows_per_warp; ++r) {
        if (row + r >= args.rows) break;
        const char* from = args.streams[k] + int64_t{row + r} * args.strides[k];
        char* to = ring + k * stream_bytes + r * pitch;
#pragma unroll 4
        for (int c = team.warp * 32 + lane; c < chunks * kElements; c += team.warps * 32) {
          Chunk<Format, false> one;
          one.clear();
          if (c < columns) one.load_any(from + static_cast<int64_t>(first + c) * args.inner[k]);
          one.store(to + c * Format::kBytes);
        }
        if (kLayerNorm && clustered && k == 0 && place < 3) {
          const int64_t vector = place == 0 ? 0 : place == 1 ? vectors / 2 : vectors - 1;
          Chunk<Format, false> one;
          one.load_any(from + vector * kElements * args.inner[0]);
          one.store(pivots[0][place]);
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
    // The quarters or halves of a vector lie apart, so that neighbours read neighbouring banks.
    constexpr int kAtOnce = 8;
    const int step = blockDim.x;
#pragma unroll 1
    for (int c = threadIdx.x; c < (last + 1) * kElements; c += kAtOnce * step) {
      float some[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) some[i] = weight_at(c + i * step);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = c + i * step;
        if (at >= (last + 1) * kElements) break;
        weight[(at / 4 % kParts * (last + 1) + at / kElements) * 4 + at % 4] = some[i];
      }
    }
  }

  float sum_weight[kVectors][kElements];
  float sum_bias[kVectors][kElements];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      sum_weight[v][i] = 0.0f;
      if constexpr (kLayerNorm) sum_bias[v][i] = 0.0f;
    }
  }
  if (clustered) cluster_wait();
  __syncthreads();  // barriers and weights are there

  const uint32_t weights = shared_address(weight) + place * 16;
  const uint32_t weight_part = (last + 1) * 16;
  const uint32_t step = places * 16;
  const auto read_weight = [&](float (&w)[kElements], int v) {
    const uint32_t at = weights + v * step;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      uint32_t part[4];
      load_shared(part, at + p * weight_part);
#pragma unroll
      for (int i = 0; i < 4; ++i) w[4 * p + i] = __uint_as_float(part[i]);
    }
  };

  const uint32_t own = shared_address(ring) + in_warp * pitch;
  // Where three of a row's values are: from the middle one distances are measured.
  const uint32_t pivot_base = clustered ? shared_address(pivots) : own;
  const uint32_t pivot_stage = clustered ? sizeof(pivots[0]) : stage_bytes;
  const uint32_t pivot_middle = clustered ? 16 : chunks / 2 * 16;
  const uint32_t pivot_last = clustered ? 32 : last * 16;
  // Of a thread's vectors so many are in the row.
  const int mine = max(0, (chunks - place + places - 1) / places);
  // Whether there is a row for this part of the warp.
  const auto real = [&](int tile) {
    return !kPartial || first_row + tile * row_step + in_warp < args.rows;
  };

  // Calls visit(v, x, weight, gradient, address) with the values of `count` vectors in a stage.
  const auto visit_all = [&](int stage, int count, auto visit) {
    uint32_t at = own + stage * stage_bytes + place * 16;
    asm volatile("" : "+r"(at));  // made once, not at each use
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v >= count) break;
      const uint32_t from = at + v * step;
      Values vx, vg;
      load_shared(vx.words, from);
      load_shared(vg.words, from + stream_bytes);
      float xs[kElements], gs[kElements];
      vx.unpack(xs);
      vg.unpack(gs);
      if constexpr (kKeep) {
        visit(v, xs, kept[v], gs, from);
      } else {
        float ws[kElements];
        read_weight(ws, v);
        visit(v, xs, ws, gs, from);
      }
    }
  };

  // A single stage has no room for a row ahead.
  const int ahead = kWide && args.stages > 1 ? 1 : 0;
  int stage = 0, oldest = 0;  // of the first pass, of the second
  uint32_t phase = 0;         // of the barriers of `stage`
  float mean = 0.0f, held = 0.0f;
#pragma unroll 1
  for (int step_number = 0; step_number < tiles + ahead; ++step_number) {
    float guess = 0.0f, given = 0.0f;
    if (const int tile = step_number; tile < tiles) {
      if constexpr (kWide) {
        mbarrier_wait(&arrived[stage], phase);
      } else {
        copy(tile);
      }
      const bool there = real(tile);
      if (kLayerNorm && there) {
        // The middle one of three of the row's values: so little cancels.
        const uint32_t from = pivot_base + stage * pivot_stage;
        uint32_t words[3];
        load_shared(words[0], from);
        load_shared(words[1], from + pivot_middle);
        load_shared(words[2], from + pivot_last);
        const float a = Format::from_bits(words[0]), b = Format::from_bits(words[1]);
        guess = fmaxf(fminf(a, b), fminf(fmaxf(a, b), Format::from_bits(words[2])));
      }
      // RMS: the sum of squares of x and that of its products with the weighted gradient. Layer:
      // the sums of distances from a value near the mean, of weighted gradients, of squared
      // distances, of products.
      float sums[kSums];
#pragma unroll
      for (int k = 0; k < kSums; ++k) sums[k] = 0.0f;
      visit_all(stage, there ? mine : 0,
                [&](int v, const auto& xs, const auto& ws, const auto& gs, uint32_t) {
                  // Of the row's columns: what it copies as vectors has no others.
                  const int left = kWide ? kElements : columns - (v * places + place) * kElements;
#pragma unroll
                  for (int i = 0; i < kElements; ++i) {
                    const float weighted = ws[i] * gs[i];
                    if constexpr (kLayerNorm) {
                      const float distance = i < left ? xs[i] - guess : 0.0f;
                      sums[0] += distance;
                      sums[1] += weighted;
                      sums[2] += distance * distance;
                      sums[3] += distance * weighted;
                    } else if (i < left) {
                      sums[0] += xs[i] * xs[i];
                      sums[1] += xs[i] * weighted;
                    }
                  }
                });
      if (++stage == args.stages) {
        stage = 0;
        phase ^= 1;
      }
      given = Sums::give(team, scratch, tile, sums);
    }
    if (const int tile = step_number - ahead; tile >= 0) {
      if (ahead == 0) {
        mean = guess;
        held = given;
      }
      float sums[kSums];
      Sums::take(team, scratch, tile, held, sums);
      float square = sums[0], dot = sums[1], total = 0.0f;
      if constexpr (kLayerNorm) {
        const float distance = sums[0] * args.inverse_columns;
        mean += distance;
        total = sums[1];
        square = sums[2] - sums[0] * distance;
        dot = sums[3] - sums[1] * distance;
      }
      // grad_x = rstd * (w g - mean(w g) - n mean(w g n)), n = (x - mean) rstd.
      const float rstd = reciprocal_root(fmaf(square, args.inverse_columns, args.eps));
      dot *= args.inverse_columns * rstd * rstd * rstd;
      total *= args.inverse_columns * rstd;
      const int64_t row = first_row + int64_t{tile} * row_step + in_warp;
      char* const out =
          args.grad_x + row * args.grad_x_stride + first * Format::kBytes + place * 16;
      visit_all(oldest, real(tile) ? mine : 0,
                [&](int v, auto& xs, const auto& ws, const auto& gs, uint32_t from) {
#pragma unroll
                  for (int i = 0; i < kElements; ++i) {
                    const float distance = kLayerNorm ? xs[i] - mean : xs[i];
                    const float scaled = gs[i] * rstd;
                    sum_weight[v][i] += scaled * distance;
                    if constexpr (kLayerNorm) sum_bias[v][i] += gs[i];
                    xs[i] = ws[i] * scaled - (kLayerNorm ? distance * dot + total : distance * dot);
                  }
                  if (args.stream_count == 3) {
                    float added[kElements];
                    Values values;
                    load_shared(values.words, from + 2 * stream_bytes);
                    values.unpack(added);
#pragma unroll
                    for (int i = 0; i < kElements; ++i) xs[i] += added[i];
                  }
                  char* const to = out + v * step;
                  if constexpr (kWide) {
                    Values result;
                    result.pack(xs);
                    result.store(to);
                  } else {
                    const int left = columns - (v * places + place) * kElements;
#pragma unroll
                    for (int i = 0; i < kElements; ++i) {
                      if (i < left) store_element<Format>(to + i * Format::kBytes, xs[i]);
                    }
                  }
                });
      if constexpr (kWide) {
        __syncwarp();
        const uint32_t others = team.warps - 1;
        if (lane == 0 &&
            (others == 0 || count_shared(&done[team.index][tile & 1], others) == others)) {
          fetch(tile + args.stages, oldest, false);
        }
        if (++oldest == args.stages) oldest = 0;
      } else {
        team.sync();
      }
    }
    mean = guess;
    held = given;
  }

  if (args.partial[0] == nullptr && args.partial[1] == nullptr) return;
#pragma unroll
  for (int kind = 0; kind < kKinds; ++kind) {
    if (args.partial[kind] == nullptr) continue;
    leave_sums<kWide>(kind == 0 ? sum_weight : sum_bias, team, kPartial ? team.lanes : 32,
                      reinterpret_cast<float*>(shared), args.slice, columns,
                      args.partial[kind] + static_cast<int64_t>(part) * args.columns + first);
  }
}

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_BACKWARD_CUH_
