// SPDX-License-Identifier: Apache-2.0
// Sums over the columns of several rows at once, by a team of threads: one barrier for all of them,
// and shuffles that halve what is left to add instead of one tree a value.
#ifndef KERNELS_NORM_ROW_SUMS_CUH_
#define KERNELS_NORM_ROW_SUMS_CUH_

#include "kernels/norm/teams.cuh"

namespace tiercel {

// Adds each value over groups of `lanes` lanes, a power of two and not less than kValues: a lane
// gets the sum of value number lane % kValues.
template <int kValues>
__device__ __forceinline__ float lanes_scatter(float (&values)[kValues], int lanes) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int offset = 1; offset < kValues; offset *= 2) {
    const bool odd = lane & offset;
#pragma unroll
    for (int i = 0; i < kValues / offset / 2; ++i) {
      const float mine = odd ? values[2 * i + 1] : values[2 * i];
      const float other = odd ? values[2 * i] : values[2 * i + 1];
      values[i] = mine + __shfl_xor_sync(kFullWarp, other, offset);
    }
  }
#pragma unroll
  for (int offset = kValues; offset < 32; offset *= 2) {
    if (offset < lanes) values[0] += __shfl_xor_sync(kFullWarp, values[0], offset);
  }
  return values[0];
}

// A row's sums: kRms of squares and of products; kLayer four, about a value near the mean.
template <int kRows, bool kLayer>
struct RowSums {
  static constexpr int kValues = (kLayer ? 4 : 2) * kRows;
  static constexpr int kEntry = kLayer ? 5 * kRows : kValues;
  static_assert(kValues <= 8, "the fewest lanes of a row");

  // What warps leave for the others, twice: sums are read while the next ones are written.
  struct Scratch {
    float sums[2][kNormMaxCluster * kNormMaxWarps][kEntry];
    float counts[kNormMaxCluster * kNormMaxWarps];  // of columns
    uint64_t arrived[2];                            // mbarriers: all of a cluster's sums are there
  };

  // One thread, before the cluster's first barrier.
  static __device__ __forceinline__ void start(Scratch& scratch) {
    mbarrier_init(&scratch.arrived[0], 1);
    mbarrier_init(&scratch.arrived[1], 1);
  }

  // Each row's two sums (or four: distances, weighted gradients, squares, products) over all that
  // share it, in `sums[kind][row]`; every thread gets them, the same bits. `about`: from where the
  // warp measured distances; those of the result are from about[], which it sets.
  static __device__ __forceinline__ void add(const Team& team, Scratch& scratch, int tile,
                                             float (&sums)[kLayer ? 4 : 2][kRows],
                                             float (&about)[kRows]) {
    constexpr int kKinds = kLayer ? 4 : 2;
    float values[kValues];
#pragma unroll
    for (int k = 0; k < kKinds; ++k) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) values[k * kRows + r] = sums[k][r];
    }
    float held = lanes_scatter(values, team.lanes);
    if (team.entries() > 1) {
      const int lane = threadIdx.x % 32, parity = tile & 1;
      auto& mine = scratch.sums[parity][team.entry()];
      uint64_t* const arrived = &scratch.arrived[parity];
      if (team.blocks > 1 && threadIdx.x == 0) {
        mbarrier_expect(arrived, team.entries() * kEntry * sizeof(float));
      }
      write(team, mine[lane % kValues], arrived, lane / kValues, 32 / kValues, held);
      if constexpr (kLayer) {
        float own = about[0];
#pragma unroll
        for (int r = 1; r < kRows; ++r) own = lane % kRows == r ? about[r] : own;
        write(team, mine[kValues + lane % kRows], arrived, lane / kRows, 32 / kRows, own);
      }
      if (team.blocks == 1) {
        team.sync();
      } else {
        mbarrier_wait_cluster(arrived, tile >> 1 & 1);
      }
      const auto* const entries = scratch.sums[parity] + team.first_entry();
      if constexpr (!kLayer) {
        held = 0.0f;
#pragma unroll 1
        for (int i = lane / kValues; i < team.entries(); i += 32 / kValues) {
          held += entries[i][lane % kValues];
        }
        held = over_copies<kValues>(held);
      } else {
        const int row = lane % kRows;
        const float* const counts = scratch.counts + team.first_entry();
        const float from = entries[0][kValues + row];
        float distances = 0.0f, weighted = 0.0f, squares = 0.0f, products = 0.0f;
#pragma unroll 1
        for (int i = lane / kRows; i < team.entries(); i += 32 / kRows) {
          const float shift = entries[i][kValues + row] - from, count = counts[i];
          const float a = entries[i][row], b = entries[i][kRows + row];
          distances += fmaf(count, shift, a);
          weighted += b;
          squares += entries[i][2 * kRows + row] + shift * fmaf(count, shift, 2.0f * a);
          products += fmaf(shift, b, entries[i][3 * kRows + row]);
        }
        const float found[4] = {over_copies<kRows>(distances), over_copies<kRows>(weighted),
                                over_copies<kRows>(squares), over_copies<kRows>(products)};
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          about[r] = __shfl_sync(kFullWarp, from, r);
#pragma unroll
          for (int k = 0; k < 4; ++k) sums[k][r] = __shfl_sync(kFullWarp, found[k], r);
        }
        return;
      }
    }
#pragma unroll
    for (int k = 0; k < kKinds; ++k) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sums[k][r] = __shfl_sync(kFullWarp, held, k * kRows + r, team.lanes);
      }
    }
  }

  // Tells the others how many columns this warp has, once, before the cluster's first barrier ends.
  static __device__ __forceinline__ void publish(const Team& team, Scratch& scratch, float count) {
    const int lane = threadIdx.x % 32;
    if (team.blocks == 1) {
      if (lane == 0) scratch.counts[team.entry()] = count;
    } else if (lane < static_cast<int>(team.blocks)) {
      store_remote(&scratch.counts[team.entry()], lane, count);
    }
  }

 private:
  template <int kFrom>
  static __device__ __forceinline__ float over_copies(float value) {
#pragma unroll
    for (int offset = kFrom; offset < 32; offset *= 2) {
      value += __shfl_xor_sync(kFullWarp, value, offset);
    }
    return value;
  }

  // To this place in all blocks that share the row; the lanes that have it do a part each.
  static __device__ __forceinline__ void write(const Team& team, float& place, uint64_t* arrived,
                                               int copy, int copies, float value) {
    if (team.blocks == 1) {
      if (copy == 0) place = value;
      return;
    }
#pragma unroll 1
    for (int b = copy; b < static_cast<int>(team.blocks); b += copies) {
      send_remote(&place, arrived, b, value);
    }
  }
};

}  // namespace tiercel

#endif  // KERNELS_NORM_ROW_SUMS_CUH_
