// SPDX-License-Identifier: Apache-2.0
// Who works on a row: a team of 4 to 512 threads, or a cluster of blocks; and how they add up.
#ifndef KERNELS_NORM_TEAMS_CUH_
#define KERNELS_NORM_TEAMS_CUH_

#include <cstdint>

#include "kernels/norm/moments.cuh"
#include "kernels/norm/norm_kernels.h"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

// To the last bit or nearly: the hardware's approximation and a Newton step, which 0 and infinity
// would not survive.
__device__ __forceinline__ float reciprocal_root(float value) {
  const float root = rsqrtf(value);
  const float better = root * fmaf(-0.5f * value * root, root, 1.5f);
  return value > 0.0f && value < __int_as_float(0x7f800000) ? better : root;
}

// What the warps of a block, or of a cluster's blocks, leave for each other, once.
struct BlockScratch {
  float4 values[kNormMaxCluster * kNormMaxWarps];
  uint64_t arrived;  // an mbarrier: all of a cluster's values are there
};

// A row that belongs to a whole block, or to all blocks of a cluster.
struct BlockTeam {
  int rank;
  int blocks;

  __device__ __forceinline__ BlockTeam(int rank, int blocks) : rank(rank), blocks(blocks) {}

  __device__ __forceinline__ int warps() const { return blockDim.x / 32; }

  // Every block has a barrier that counts what the cluster's blocks send. All have come by here
  // before anything is sent.
  __device__ __forceinline__ void start(BlockScratch& scratch) const {
    if (blocks == 1) return;
    if (threadIdx.x == 0) {
      mbarrier_init(&scratch.arrived, 1);
      mbarrier_init_fence();
      mbarrier_expect(&scratch.arrived, warps() * blocks * sizeof(float4));
    }
    cluster_arrive_relaxed();
  }

  // Gives a warp's value to all, and waits for theirs.
  __device__ __forceinline__ void exchange(BlockScratch& scratch, float4 value) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (blocks == 1) {
      if (lane == 0) scratch.values[warp] = value;
      __syncthreads();
      return;
    }
    cluster_wait();  // for start()
    if (lane < blocks) {
      send_remote(&scratch.values[rank * warps() + warp], &scratch.arrived, lane, value);
    }
    mbarrier_wait_cluster(&scratch.arrived, 0);
  }

  // The sum of all warps' values.
  __device__ __forceinline__ float sum(BlockScratch& scratch, float value) const {
    const int entries = warps() * blocks;
    exchange(scratch, make_float4(value, 0.0f, 0.0f, 0.0f));
    value = 0.0f;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < entries; i += 32) value += scratch.values[i].x;
    return lanes_reduce<32>(value, Sum());
  }

  // Joins the warps' entries into the row's moments.
  __device__ __forceinline__ RowMoments join(BlockScratch& scratch, float4 value,
                                             float inverse_columns) const {
    const int entries = warps() * blocks;
    exchange(scratch, value);
    // About the first warp's mean, which is as good as the row's: all sums at once.
    Moments all = {scratch.values[0].y + scratch.values[0].w, 0.0f, 0.0f};
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < entries; i += 32) {
      const float4 part = scratch.values[i];
      const float distance = Moments::distance(part, all.about);
      all.sum += part.z * distance;
      all.square += part.x + part.z * distance * distance;
    }
    all.sum = lanes_reduce<32>(all.sum, Sum());
    all.square = lanes_reduce<32>(all.square, Sum());
    return all.of_row(inverse_columns);
  }
};

// A block's threads by rows: less than a warp a row (`lanes` < 32, several rows a warp), whole
// warps, the whole block, or all blocks of a cluster.
struct Team {
  int lanes;      // of a warp that share a row
  int warps;      // of this block that share a row
  int warp;       // this thread's, in the team
  int index;      // of the team in the block
  int place;      // this thread's among those of a row in this block
  int places;     // how many those are
  uint32_t rank;  // of the block in the cluster
  uint32_t blocks;

  __device__ __forceinline__ explicit Team(int threads_per_row) {
    const int thread = threadIdx.x;
    lanes = threads_per_row < 32 ? threads_per_row : 32;
    warps = threads_per_row < 32 ? 1 : threads_per_row / 32;
    // By a shuffle, so that the compiler knows it the same in all of a warp (uniform registers).
    const int of_block = __shfl_sync(kFullWarp, thread / 32, 0);
    warp = of_block % warps;
    index = of_block / warps;
    place = thread % threads_per_row;
    places = threads_per_row;
    rank = cluster_rank();
    blocks = cluster_blocks();
  }

  // Waits for the team's threads in this block.
  __device__ __forceinline__ void sync() const {
    if (warps == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "r"(warps * 32) : "memory");
    }
  }

  // Says that this warp has come to where another one waits in sync().
  __device__ __forceinline__ void arrive() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(index + 1), "r"(warps * 32) : "memory");
  }

  // Warps that share a row.
  __device__ __forceinline__ int entries() const { return warps * static_cast<int>(blocks); }
  // The place of the first of them, of this warp.
  __device__ __forceinline__ int first_entry() const { return blocks == 1 ? index * warps : 0; }
  __device__ __forceinline__ int entry() const {
    return blocks == 1 ? index * warps + warp : static_cast<int>(rank) * warps + warp;
  }
};

}  // namespace tiercel

#endif  // KERNELS_NORM_TEAMS_CUH_
