// SPDX-License-Identifier: Apache-2.0
// Gradients of rms_norm and layer_norm.
//
// Plan: one block per multiprocessor, or a cluster for very long rows, walks over tiles of
// neighbouring rows; a team of threads handles one row at a time. TMA bulk copies prefetch rows
// into a ring of stages. Each team has its own ring, so teams do not wait for each other; one
// mbarrier per stage signals that its row has arrived. The statistics are recomputed, which reads
// nothing more. A thread has the same columns of every row, so the parameters' gradients accumulate
// in registers. Each block writes them once, as one row of partial sums, and norm_reduce adds those
// in a fixed order.
//
// Lower bound: x and grad read once, grad_x written once, at the speed of a copy. 16-bit layer
// norms are near the issue limit, too: about 25 of the 43 instructions per element that fit into
// that time.
#ifndef KERNELS_NORM_NORM_BACKWARD_CUH_
#define KERNELS_NORM_NORM_BACKWARD_CUH_

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

template <typename Format, bool kAligned16, int kVectors, int kRows, bool kLayerNorm>
__global__ void __launch_bounds__(kAligned16 ? kNormMaxThreads : kNormNarrowThreads, 1)
    norm_backward(const __grid_constant__ NormBackwardArgs args) {
  using Values = Chunk<Format, true>;
  constexpr int kElements = Values::kElements;
  constexpr int kKinds = kLayerNorm ? 2 : 1;
  constexpr NormKind kKind = kLayerNorm ? NormKind::kLayer : NormKind::kRms;
  constexpr bool kHold = norm_backward_keeps_rows(Format::kBytes, kVectors, kRows, kKind);
  constexpr bool kKeep =
      norm_backward_keeps_weight(Format::kBytes, kAligned16, kVectors, kRows, kKind);
  // Refill a tile's stages once it is in registers, instead of once grad_x is written.
  constexpr bool kEarly = Format::kBytes == 2;  // measured
  // Prefetch more rows than there are stages, if registers allow.
  constexpr bool kPrefetch = !(kLayerNorm && kRows == 2);
  constexpr int kParts = kElements / 4;
  // A row may belong to part of a warp; a row may belong to several warps.
  constexpr bool kPartial = !kAligned16 || kVectors * kRows <= 2;
  constexpr bool kShared = !kAligned16 || kVectors * kRows > 2;
  // Each warp sends its own sums (row_sums.cuh): where that is faster and registers allow it.
  constexpr bool kDirect = !kAligned16 || (Format::kBytes == 2 && kRows == (kLayerNorm ? 2 : 1));
  using Sums = RowSums<kRows, kLayerNorm ? 4 : 2, kPartial, kShared, kDirect>;
  extern __shared__ __align__(128) char shared[];
  __shared__ typename Sums::Scratch scratch;
  __shared__ uint64_t full[kNormMaxWarps * kNormMaxStages];
  __shared__ __align__(16) char pivots[kNormMaxStages][3][16];

  constexpr bool kPairs =
      norm_backward_can_pair(Format::kBytes, kAligned16, kVectors, kRows, kKind);
  const bool paired = kPairs && args.paired;
  Team team(args.threads_per_row);
  if (paired) team.rank = 0, team.blocks = 1;  // a row has one block
  const int lane = threadIdx.x % 32;
  const int in_warp = kPartial ? lane / team.lanes : 0;
  const int rows_per_warp = kPartial ? 32 / team.lanes : 1;
  const int teams = blockDim.x / 32 / team.warps;
  const int place = team.place, places = team.places;
  const int first = team.rank * args.slice;
  const int columns = max(0, min(args.slice, args.columns - first));
  const int chunks = (columns + kElements - 1) / kElements;
  const int rows_at_once = teams * rows_per_warp;  // distance between a thread's rows
  // A team's rows are first_row(tile) + r * rows_at_once, below `end`.
  const RowTiles<kAligned16> tiles(args, team, rows_per_warp, rows_at_once * kRows);
  // Each stage of a team's ring holds one row, or one per part of a warp.
  const int pitch = args.slice * Format::kBytes;
  const int stream_bytes = pitch * rows_per_warp;
  const int stage_bytes = stream_bytes * args.stream_count;
  const bool clustered = kShared && team.blocks > 1;
  const int vectors = (args.columns + kElements - 1) / kElements;

  char* const ring = shared + team.index * args.stages * stage_bytes;
  uint64_t* const arrived = full + team.index * args.stages;
  float* const weight = reinterpret_cast<float*>(shared + args.weight_offset);
  const bool leads = team.warp == 0;  // a warp of each team starts its copies
  const bool leader = leads && lane == 0;
  const int weight_bytes = args.weight_float32 ? 4 : Format::kBytes;
  // The weight can be read 16 bytes at a time.
  const bool whole_weights = kAligned16 && columns > 0 && args.weight != nullptr &&
                             reinterpret_cast<uintptr_t>(args.weight) % 16 == 0;
  if (leader) {
    if constexpr (kAligned16) {
#pragma unroll 1
      for (int s = 0; s < args.stages; ++s) mbarrier_init(&arrived[s], 1);
    }
    if (clustered) Sums::start(scratch);
    mbarrier_init_fence();
  }
  if (clustered) cluster_arrive();

  // One warp starts the copies of the team's row number `unit`, or prefetches it into the L2 while
  // x may not be read yet.
  const auto fetch = [&](int unit, int stage, bool prefetch) {
    const int tile = unit / kRows;
    if (tile >= tiles.count) return;
    const int row = tiles.first_row(tile) + unit % kRows * rows_at_once;
    const int rows = max(0, min(rows_per_warp, tiles.end - row));
    const uint32_t bytes = columns * Format::kBytes;
    const bool guess = kLayerNorm && clustered && rows > 0;  // of the mean: other blocks' columns
    if (!prefetch) {
      elected_expect(&arrived[stage], bytes * rows * args.stream_count + (guess ? 48 : 0));
    }
    if (bytes * rows > 0) {
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
          if (prefetch) {
            elected_prefetch(from, size);
          } else {
            elected_load(to, from, size, &arrived[stage]);
          }
        }
      }
    }
    if constexpr (kLayerNorm && kShared) {
      if (!guess || prefetch) return;
#pragma unroll 1
      for (int i = 0; i < 3; ++i) {
        const int vector = i == 0 ? 0 : i == 1 ? vectors / 2 : vectors - 1;
        elected_load(pivots[stage][i],
                     args.streams[0] + int64_t{row} * args.strides[0] + vector * 16, 16,
                     &arrived[stage]);
      }
    }
  };
  const auto fetch_first = [&](bool prefetch) {
    if constexpr (kAligned16) {
      if (!leads) return;
#pragma unroll 1
      for (int s = 0; s < (prefetch && kPrefetch ? args.prefetch_rows : args.stages); ++s)
        fetch(s, s, prefetch);
    }
  };
  // Load the weight before the rows: behind them it arrives late if no grid runs before this one.
  if (leader && team.index == 0 && whole_weights) {
    bulk_prefetch(args.weight + first * weight_bytes, columns * weight_bytes);
  }
  fetch_first(true);
  grid_dependency_launch();
  grid_dependency_wait();

  // Vectors of the weight as they are in memory. Loaded before the rows: behind them they would
  // arrive microseconds later.
  constexpr int kAsked = kKeep || kVectors > 2 ? kVectors : 2;  // by a thread at once
  uint32_t asked[kAsked][kElements];
  const int last = max(chunks - 1, 0);
  const auto ask_one = [&](uint32_t (&words)[kElements], int chunk) {
    if (!whole_weights || chunk >= chunks) return;
    const char* const from = args.weight + (first + chunk * kElements) * weight_bytes;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      uint32_t part[4];
      if (p > 0 && !args.weight_float32) break;
      load_vector(part, from + 16 * p);
#pragma unroll
      for (int i = 0; i < 4; ++i) words[4 * p + i] = part[i];
    }
  };
  const auto ask = [&](int chunk) {
#pragma unroll
    for (int k = 0; k < kAsked; ++k) ask_one(asked[k], chunk + k * (kKeep ? places : blockDim.x));
  };
  ask(kKeep ? place : threadIdx.x);
  fetch_first(false);

  // Rows that TMA cannot copy are copied by the team's threads, one element at a time; zeros fill
  // the last vector.
  const auto copy = [&](int tile) {
    const int row = tiles.first_row(tile);
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

  // The weight as float32; ones if there is none.
  const auto weight_at = [&](int c) {
    if (args.weight == nullptr || c >= columns) return c < columns ? 1.0f : 0.0f;
    if (args.weight_float32) return reinterpret_cast<const float*>(args.weight)[first + c];
    Chunk<Format, false> one;
    one.load_any(args.weight + (first + c) * Format::kBytes);
    return Format::from_bits(one.words[0]);
  };
  const auto floats_of = [&](float (&w)[kElements], const uint32_t (&words)[kElements]) {
    if (args.weight_float32) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) w[i] = __uint_as_float(words[i]);
    } else {
      Values packed;
#pragma unroll
      for (int i = 0; i < 4; ++i) packed.words[i] = words[i];
      packed.unpack(w);
    }
  };
  float kept[kKeep ? kVectors : 1][kElements];
  if constexpr (kKeep) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int c = (v * places + place) * kElements;
      if (whole_weights && c < columns) {
        floats_of(kept[v], asked[v]);
      } else {
#pragma unroll
        for (int i = 0; i < kElements; ++i) kept[v][i] = weight_at(c + i);
      }
    }
  } else if (whole_weights) {
    // The quarters or halves of a vector are stored apart, so that neighbouring threads read
    // neighbouring banks.
#pragma unroll 1
    for (int c = threadIdx.x; c <= last; c += kAsked * blockDim.x) {
#pragma unroll
      for (int k = 0; k < kAsked; ++k) {
        const int at = c + k * blockDim.x;
        if (at > last) break;
        float some[kElements];
        floats_of(some, asked[k]);
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(some[4 * p + i]);
          store_vector(weight + (p * (last + 1) + at) * 4, words);
        }
      }
      ask(c + kAsked * blockDim.x);
    }
  } else {
#pragma unroll 1
    for (int c = threadIdx.x; c < (last + 1) * kElements; c += blockDim.x) {
      const int at = c / kElements, i = c % kElements;
      weight[(i / 4 * (last + 1) + at) * 4 + i % 4] = weight_at(c);
    }
  }

  float gradients[kKinds][kVectors][kElements] = {};  // of weight and bias
  if (clustered) cluster_wait();
  __syncthreads();  // barriers and weights are ready

  const uint32_t weights = shared_address(weight) + min(place, last) * 16;  // any will do beyond
  const uint32_t weight_part = (last + 1) * 16;
  const uint32_t step = places * 16;
  // The number of a thread's vectors inside the row; the values of the others are zero.
  const int mine = max(0, (chunks - place + places - 1) / places);
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
  // Offsets of three of a row's values; distances are taken from their median.
  const uint32_t pivot_base = clustered ? shared_address(pivots) : own;
  const uint32_t pivot_stage = clustered ? sizeof(pivots[0]) : stage_bytes;
  const uint32_t pivot_middle = clustered ? 16 : chunks / 2 * 16;
  const uint32_t pivot_last = clustered ? 32 : last * 16;
  const bool third = args.stream_count == 3;
  const bool read_once = kHold && !third;

  Values x[kHold ? kRows : 1][kHold ? kVectors : 1], grad[kHold ? kRows : 1][kHold ? kVectors : 1];
  int stage = 0;
  uint32_t phase = 0;  // of the barriers of this stage
  const auto advance = [&](int& stage) {
    if (++stage == args.stages) stage = 0;
  };
#pragma unroll 1
  for (int tile = 0; tile < tiles.count; ++tile) {
    const int row = tiles.first_row(tile) + in_warp;
    const auto real = [&](int r) { return row + r * rows_at_once < tiles.end; };
    if constexpr (!kAligned16) copy(tile);
    const auto first_stage = [&] {  // of this tile, once all of it is read
      const int first = stage - kRows;
      return first < 0 ? first + args.stages : first;
    };
    const auto refill = [&] {
      if constexpr (kAligned16) {
        if (leads) {
          int refilled = first_stage();
#pragma unroll 1
          for (int r = 0; r < kRows; ++r) {
            fetch(tile * kRows + args.stages + r, refilled, false);
            advance(refilled);
          }
        }
        __syncwarp();
      }
    };
    int live[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) live[r] = real(r) ? mine : 0;

    float sums[kLayerNorm ? 4 : 2][kRows], guesses[kRows];
    // Calls visit(r, v, x, weight, gradient, address) for each vector.
    const auto visit_all = [&](bool again, auto visit) {
      int at_stage = again ? first_stage() : stage;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        uint32_t at = own + at_stage * stage_bytes + place * 16;
        asm volatile("" : "+r"(at));  // made once, not at each use
        advance(at_stage);
        if (!again) {
          if constexpr (kAligned16) {
            mbarrier_wait(&arrived[stage], phase);
          }
          guesses[r] = 0.0f;
          if (kLayerNorm && real(r)) {
            const uint32_t from = pivot_base + stage * pivot_stage;
            uint32_t words[3];
            load_shared(words[0], from);
            load_shared(words[1], from + pivot_middle);
            load_shared(words[2], from + pivot_last);
            guesses[r] = middle_of(Format::from_bits(words[0]), Format::from_bits(words[1]),
                                   Format::from_bits(words[2]));
          }
          stage = at_stage;
          if (stage == 0) phase ^= 1;
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          Values& vx = x[kHold ? r : 0][kHold ? v : 0];
          Values& vg = grad[kHold ? r : 0][kHold ? v : 0];
          const uint32_t from = at + v * step;
          if (!kHold || !again) {
            if (v < live[r]) {
              load_shared(vx.words, from);
              load_shared(vg.words, from + stream_bytes);
            } else {  // no distance from the guess, no gradient
              float same[kElements];
#pragma unroll
              for (int i = 0; i < kElements; ++i) same[i] = kLayerNorm ? guesses[r] : 0.0f;
              vx.pack(same);
              vg.clear();
            }
          } else {
            vx.drop_unpacked_copies();
            vg.drop_unpacked_copies();
          }
          float xs[kElements], gs[kElements];
          vx.unpack(xs);
          vg.unpack(gs);
          if constexpr (kKeep) {
            visit(r, v, xs, kept[v], gs, from);
          } else {
            float ws[kElements];
            read_weight(ws, v < mine ? v : 0);
            visit(r, v, xs, ws, gs, from);
          }
        }
      }
    };
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < (kLayerNorm ? 4 : 2); ++k) sums[k][r] = 0.0f;
    }

    // Sums per row. RMS: squares of x, products of x and the weighted gradient. Layer: distances
    // from a value near the mean, weighted gradients, squared distances, products.
    visit_all(false, [&](int r, int v, const auto& xs, const auto& ws, const auto& gs, uint32_t) {
      if constexpr (kLayerNorm) {
        const int left = columns - (v * places + place) * kElements;
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          const float distance = kAligned16 || i < left ? xs[i] - guesses[r] : 0.0f;
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
    Sums::add(team, scratch, tile, sums);  // also: the whole team has read the stages
    if (kEarly && read_once) refill();

    // grad_x = rstd * (w g - mean(w g) - n mean(w g n)), n = (x - mean) rstd. The mean stays a
    // distance from the guess: adding the two would round it (moments.cuh).
    float rstds[kRows], aparts[kRows], dots[kRows], totals[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float apart = kLayerNorm ? sums[0][r] * args.inverse_columns : 0.0f;
      const float square = kLayerNorm ? fmaf(-apart, sums[0][r], sums[2][r]) : sums[0][r];
      const float rstd =
          real(r) ? reciprocal_root(fmaf(square, args.inverse_columns, args.eps)) : 0.0f;
      const float share = args.inverse_columns * rstd;
      rstds[r] = rstd;
      if constexpr (kLayerNorm) {
        aparts[r] = apart;
        dots[r] = fmaf(-apart, sums[1][r], sums[3][r]) * (share * rstd * rstd);
        totals[r] = sums[1][r] * share;
      } else {
        dots[r] = sums[1][r] * (share * rstd * rstd);
      }
    }
    char* const out =
        args.grad_x + int64_t{row} * args.grad_x_stride + first * Format::kBytes + place * 16;
    visit_all(true, [&](int r, int v, auto& xs, const auto& ws, const auto& gs, uint32_t from) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        if constexpr (kLayerNorm) {
          const float distance = (xs[i] - guesses[r]) - aparts[r];
          const float scaled = gs[i] * rstds[r];
          gradients[0][v][i] += scaled * distance;
          gradients[1][v][i] += gs[i];
          xs[i] = ws[i] * scaled - (distance * dots[r] + totals[r]);
        } else {
          const float scaled = gs[i] * rstds[r];
          gradients[0][v][i] += scaled * xs[i];
          xs[i] = ws[i] * scaled - xs[i] * dots[r];
        }
      }
      if (v < live[r]) {
        if (third) {
          float added[kElements];
          Values values;
          load_shared(values.words, from + 2 * stream_bytes);
          values.unpack(added);
#pragma unroll
          for (int i = 0; i < kElements; ++i) xs[i] += added[i];
        }
        char* const to = out + r * rows_at_once * args.grad_x_stride + v * step;
        if constexpr (kAligned16) {
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
      }
    });
    if (!kAligned16 || !read_once) team.sync();
    if (!kEarly || !read_once) refill();
  }

  if (args.partial[0] == nullptr && args.partial[1] == nullptr) return;
  if constexpr (kPairs) {
    if (paired) {
      leave_sums_of_pair(gradients, reinterpret_cast<float4*>(shared), args);
      return;
    }
  }
  float* out[kKinds];
#pragma unroll
  for (int k = 0; k < kKinds; ++k) {
    out[k] = args.partial[k];
    if (out[k] != nullptr) out[k] += static_cast<int64_t>(tiles.part) * args.columns + first;
  }
  leave_sums<kAligned16>(gradients, team, kPartial ? team.lanes : 32,
                         reinterpret_cast<float*>(shared), args.stages * stage_bytes / 4,
                         args.slice, columns, out);
}

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_BACKWARD_CUH_
