// SPDX-License-Identifier: Apache-2.0
// The threads that share a row, a team of 4 to 512 threads or a cluster of blocks, and their
// reductions.
#ifndef KERNELS_NORM_TEAMS_CUH_
#define KERNELS_NORM_TEAMS_CUH_

#include <cstdint>

#include "kernels/norm/moments.cuh"
#include "kernels/norm/norm_kernels.h"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {

// Exact to about the last bit: the hardware's approximation and one Newton step. 0 and infinity are
// not valid inputs.
__device__ __forceinline__ float reciprocal_root(float value) {
  const float root = rsqrtf(value);
  const float better = root * fmaf(-0.5f * value * root, root, 1.5f);
  return value > 0.0f && value < __int_as_float(0x7f800000) ? better : root;
}

// Scratch for one exchange between the warps of a block or of a cluster.
struct BlockScratch {
  float4 values[kNormMaxCluster * kNormMaxWarps];
  uint64_t arrived;  // an mbarrier: all of the cluster's values have arrived
};

// A row that belongs to a whole block, or to all blocks of a cluster.
struct BlockTeam {
  int rank;
  int blocks;

  __device__ __forceinline__ BlockTeam(int rank, int blocks) : rank(rank), blocks(blocks) {}

  __device__ __forceinline__ int warps() const { return blockDim.x / 32; }

  // Every block has an mbarrier that counts the bytes the cluster's blocks send. All blocks pass
  // here before anything is sent.
  __device__ __forceinline__ void start(BlockScratch& scratch) const {
    if (blocks == 1) return;
    if (threadIdx.x == 0) {
      mbarrier_init(&scratch.arrived, 1);
      mbarrier_init_fence();
      mbarrier_expect(&scratch.arrived, warps() * blocks * sizeof(float4));
    }
    cluster_arrive_relaxed();
  }

  // Sends a warp's value to all warps and waits for theirs.
  __device__ __forceinline__ void exchange(BlockScratch& scratch, float4 value) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (blocks == 1) {
      if (lane == 0) scratch.values[warp] = value;
      __syncthreads();
      return;
    }
    cluster_wait();  // pairs with start()
    if (lane < blocks) {
      send_remote(&scratch.values[rank * warps() + warp], &scratch.arrived, lane, value);
    }
    mbarrier_wait_cluster(&scratch.arrived, 0);
  }

  // Returns the sum of all warps' values.
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
    // Distances from the first warp's mean, which is near the row's: so all sums take one step.
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

// The threads that share a row: part of a warp (`lanes` < 32, several rows per warp), whole warps,
// the whole block, or all blocks of a cluster.
struct Team {
  int lanes;      // of a warp that share a row
  int warps;      // of this block that share a row
  int warp;       // of this thread, in the team
  int index;      // of the team in the block
  int place;      // of this thread among the block's threads of the row
  int places;     // number of those threads
  uint32_t rank;  // of the block in the cluster
  uint32_t blocks;

  __device__ __forceinline__ explicit Team(int threads_per_row) {
    const int thread = threadIdx.x;
    lanes = threads_per_row < 32 ? threads_per_row : 32;
    warps = threads_per_row < 32 ? 1 : threads_per_row / 32;
    // A shuffle tells the compiler that it is uniform across the warp (uniform registers).
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

  // Arrives at the barrier that another warp waits for in sync().
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
