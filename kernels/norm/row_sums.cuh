// SPDX-License-Identifier: Apache-2.0
// A team's sums over the columns of several rows at once: one barrier for all of them, and shuffles
// that halve the number of values at each step, instead of one tree per value.
#ifndef KERNELS_NORM_ROW_SUMS_CUH_
#define KERNELS_NORM_ROW_SUMS_CUH_

#include "kernels/norm/teams.cuh"

namespace tiercel {

// Adds each value over groups of `lanes` lanes (a power of two, at least kValues). A lane gets the
// sum of value number lane % kValues.
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

// kKinds sums for each of kRows rows. kPartial: a row may belong to part of a warp. kShared: it may
// belong to several warps, and to the blocks of a cluster. Then every warp sends its sums to all
// blocks (kDirect), or one warp sends its block's: one more barrier but fewer messages, which a
// block receives one by one.
template <int kRows, int kKinds, bool kPartial, bool kShared, bool kDirect>
struct RowSums {
  static constexpr int kValues = kKinds * kRows;
  static_assert(kValues <= (kPartial ? kShared ? 8 : 4 : 32), "the fewest lanes of a row");

  // The warps' sums, double-buffered: they are read while the next ones are written.
  struct Scratch {
    float sums[2][kNormMaxCluster * kNormMaxWarps][kValues];
    uint64_t arrived[2];  // mbarriers: all of the cluster's sums have arrived
    float blocks[kDirect ? 1 : 2][kDirect ? 1 : kNormMaxCluster][kValues];
  };

  // Called by one thread, before the cluster's first barrier.
  static __device__ __forceinline__ void start(Scratch& scratch) {
    mbarrier_init(&scratch.arrived[0], 1);
    mbarrier_init(&scratch.arrived[1], 1);
  }

  // Leaves each row's total in `sums[kind][row]`; all threads of a row get the same bits.
  static __device__ __forceinline__ void add(const Team& team, Scratch& scratch, int tile,
                                             float (&sums)[kKinds][kRows]) {
    float values[kValues];
#pragma unroll
    for (int k = 0; k < kKinds; ++k) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) values[k * kRows + r] = sums[k][r];
    }
    float held = lanes_scatter(values, kPartial ? team.lanes : 32);
    if (kShared && team.entries() > 1) {
      const int lane = threadIdx.x % 32, parity = tile & 1;
      auto& mine = scratch.sums[parity][team.entry()];
      uint64_t* const arrived = &scratch.arrived[parity];
      if (!kDirect && team.blocks > 1) {
        held = through_one_warp(team, scratch, tile, held);
      } else {
        if (team.blocks > 1 && threadIdx.x == 0) {
          mbarrier_expect(arrived, team.entries() * kValues * sizeof(float));
        }
        write(team, mine[lane % kValues], arrived, lane / kValues, 32 / kValues, held);
        if (team.blocks == 1) {
          team.sync();
        } else {
          mbarrier_wait_cluster(arrived, tile >> 1 & 1);
        }
        const auto* const entries = scratch.sums[parity] + team.first_entry();
        held = 0.0f;
#pragma unroll 1
        for (int i = lane / kValues; i < team.entries(); i += 32 / kValues) {
          held += entries[i][lane % kValues];
        }
        held = over_copies<kValues>(held);
      }
    }
#pragma unroll
    for (int k = 0; k < kKinds; ++k) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sums[k][r] = __shfl_sync(kFullWarp, held, k * kRows + r, kPartial ? team.lanes : 32);
      }
    }
  }

 private:
  static __device__ __forceinline__ float over_entries(const float (*entries)[kValues], int count) {
    const int lane = threadIdx.x % 32;
    float value = 0.0f;
#pragma unroll 1
    for (int i = lane / kValues; i < count; i += 32 / kValues) value += entries[i][lane % kValues];
    return over_copies<kValues>(value);
  }

  // The cluster's sums if one warp per block sends.
  static __device__ __forceinline__ float through_one_warp(const Team& team, Scratch& scratch,
                                                           int tile, float held) {
    if constexpr (!kDirect) {
      const int lane = threadIdx.x % 32, parity = tile & 1;
      uint64_t* const arrived = &scratch.arrived[parity];
      auto* const warps = scratch.sums[parity];  // a cluster's block has one team
      if (lane < kValues) warps[team.warp][lane] = held;
      if (team.warp == 0) {
        team.sync();
        held = over_entries(warps, team.warps);
        if (lane == 0) mbarrier_expect(arrived, team.blocks * kValues * sizeof(float));
        write(team, scratch.blocks[parity][team.rank][lane % kValues], arrived, lane / kValues,
              32 / kValues, held);
      } else {
        team.arrive();
      }
      mbarrier_wait_cluster(arrived, tile >> 1 & 1);
      held = over_entries(scratch.blocks[parity], team.blocks);
    }
    return held;
  }

  template <int kFrom>
  static __device__ __forceinline__ float over_copies(float value) {
#pragma unroll
    for (int offset = kFrom; offset < 32; offset *= 2) {
      value += __shfl_xor_sync(kFullWarp, value, offset);
    }
    return value;
  }

  // Sends to this place in all blocks of the row; the lanes that hold the sums share the work.
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
