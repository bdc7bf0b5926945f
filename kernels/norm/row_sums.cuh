// SPDX-License-Identifier: Apache-2.0
// Sums over the columns of rows, by a team of threads: shuffles that halve what is left to add
// instead of one tree a value, and no barrier that all wait at.
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

// kKinds sums of a row, in two steps: a thread gives its share, and takes the sums of all when it
// has done something else, so that none waits for the slowest. kPartial: parts of a warp may have a
// row; kShared: several warps may, and the blocks of a cluster.
template <int kKinds, bool kPartial, bool kShared>
struct RowSums {
  // While a warp still takes a row's sums, others may give those of the next three rows.
  static constexpr int kBuffers = 4;

  struct Scratch {
    float sums[kBuffers][kNormMaxCluster * kNormMaxWarps][kKinds];
    uint64_t given[kNormMaxWarps / 2]
                  [kBuffers];  // mbarriers of a team: all of its warps' are there
  };

  // One thread of a team, before the cluster's first barrier.
  static __device__ __forceinline__ void start(const Team& team, Scratch& scratch) {
    if constexpr (kShared) {
      if (team.entries() == 1) return;
#pragma unroll 1
      for (int b = 0; b < kBuffers; ++b) {
        mbarrier_init(&scratch.given[given_of(team)][b], team.blocks == 1 ? team.warps : 1);
      }
    }
  }

  // Returns what a row of one warp or less has summed: sum number lane % kKinds.
  static __device__ __forceinline__ float give(const Team& team, Scratch& scratch, int tile,
                                               float (&sums)[kKinds]) {
    const float held = lanes_scatter(sums, kPartial ? team.lanes : 32);
    if (!kShared || team.entries() == 1) return held;
    const int lane = threadIdx.x % 32, b = tile % kBuffers;
    uint64_t* const given = &scratch.given[given_of(team)][b];
    float* const to = &scratch.sums[b][team.entry()][lane % kKinds];
    if (team.blocks == 1) {
      if (lane < kKinds) *to = held;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(given);
      return held;
    }
    if (threadIdx.x == 0) mbarrier_expect(given, team.entries() * kKinds * sizeof(float));
    // The lanes that have a sum send it to a block each.
#pragma unroll 1
    for (int i = lane / kKinds; i < static_cast<int>(team.blocks); i += 32 / kKinds) {
      send_remote(to, given, i, held);
    }
    return held;
  }

  // The row's sums, the same bits in every thread.
  static __device__ __forceinline__ void take(const Team& team, const Scratch& scratch, int tile,
                                              float held, float (&sums)[kKinds]) {
    if (kShared && team.entries() > 1) {
      const int lane = threadIdx.x % 32, b = tile % kBuffers;
      uint64_t* const given = const_cast<uint64_t*>(&scratch.given[given_of(team)][b]);
      const uint32_t parity = tile / kBuffers & 1;
      if (team.blocks == 1) {
        mbarrier_wait(given, parity);
      } else {
        mbarrier_wait_cluster(given, parity);
      }
      const float* const from = scratch.sums[b][team.first_entry()] + lane;
      const int left = team.entries() * kKinds - lane;
      held = left > 0 ? *from : 0.0f;
#pragma unroll 1
      for (int i = 32; i < left; i += 32) held += from[i];
#pragma unroll
      for (int offset = kKinds; offset < 32; offset *= 2) {
        held += __shfl_xor_sync(kFullWarp, held, offset);
      }
    }
#pragma unroll
    for (int k = 0; k < kKinds; ++k) {
      sums[k] = __shfl_sync(kFullWarp, held, k, kPartial ? team.lanes : 32);
    }
  }

 private:
  static __device__ __forceinline__ int given_of(const Team& team) {
    return team.warps > 1 ? team.index : 0;
  }
};

}  // namespace tiercel

#endif  // KERNELS_NORM_ROW_SUMS_CUH_
