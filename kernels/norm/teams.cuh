// SPDX-License-Identifier: Apache-2.0
// Who works on a row: a team of 8 to 512 threads, or a cluster of blocks; and how they add up.
#ifndef KERNELS_NORM_TEAMS_CUH_
#define KERNELS_NORM_TEAMS_CUH_

#include <cstdint>

#include "kernels/norm/cluster.cuh"
#include "kernels/norm/norm_kernels.h"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/ring.cuh"

namespace tiercel {

// Over groups of `lanes` neighbouring lanes, a power of two.
__device__ __forceinline__ float lanes_sum(float value, int lanes) {
  if (lanes == 32) return lanes_reduce<32>(value, Sum());
#pragma unroll 1
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

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

  // Before anything of a cluster's is sent: all blocks run, and have a barrier to count it.
  __device__ __forceinline__ void start(BlockScratch& scratch) const {
    if (blocks == 1) return;
    if (threadIdx.x == 0) {
      mbarrier_init(&scratch.arrived, 1);
      mbarrier_init_fence();
      mbarrier_expect(&scratch.arrived, warps() * blocks * sizeof(float4));
    }
    cluster_arrive_relaxed();
    cluster_wait();
  }

  // Gives a warp's value to all, and waits for theirs.
  __device__ __forceinline__ void exchange(BlockScratch& scratch, float4 value) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (blocks == 1) {
      if (lane == 0) scratch.values[warp] = value;
      __syncthreads();
      return;
    }
    if (lane < blocks) {
      send_remote(shared_address(&scratch.values[rank * warps() + warp]),
                  shared_address(&scratch.arrived), lane, value);
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

  // Of the warps' (sum, squares about its mean, mean, count): mean and squares of all.
  __device__ __forceinline__ float2 join(BlockScratch& scratch, float4 value,
                                         float inverse_columns) const {
    const int entries = warps() * blocks;
    exchange(scratch, value);
    float sum = 0.0f, square = 0.0f;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < entries; i += 32) sum += scratch.values[i].x;
    const float mean = lanes_reduce<32>(sum, Sum()) * inverse_columns;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < entries; i += 32) {
      const float4 part = scratch.values[i];
      const float distance = part.z - mean;
      square += part.y + part.w * distance * distance;
    }
    return make_float2(mean, lanes_reduce<32>(square, Sum()));
  }
};

// A block's threads by rows: less than a warp a row (`lanes` < 32, several rows a warp), whole
// warps, the whole block, or all blocks of a cluster. kBlock: where it is more than a warp it is
// the whole block, and that has no barriers but its own: of those a multiprocessor has 64 in all.
template <bool kBlock>
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
    warp = thread / 32 % warps;
    index = thread / 32 / warps;
    place = thread % threads_per_row;
    places = threads_per_row;
    rank = cluster_rank();
    blocks = cluster_size();
  }

  // Where warps of a team leave their sums, one place a warp of the cluster, twice: a row's are
  // read while the next row's are written.
  struct Scratch {
    float4 sums[2][kNormMaxCluster * kNormMaxWarps];
    float counts[kNormMaxCluster * kNormMaxWarps];  // of columns
  };

  // Waits for the team's threads in this block.
  __device__ __forceinline__ void sync() const {
    if (warps == 1) {
      __syncwarp();
    } else if constexpr (kBlock) {
      __syncthreads();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "r"(warps * 32) : "memory");
    }
  }

  // How many of `columns`, those of this block, this thread's warp has, a row of whole warps; in
  // vectors of `elements`.
  __device__ __forceinline__ float warp_columns(int vectors, int elements, int columns) const {
    int count = 0;
    for (int v = 0; v < vectors; ++v) {
      const int begin = (v * places + warp * 32) * elements;
      count += max(0, min(columns - begin, 32 * elements));
    }
    return static_cast<float>(count);
  }

  // Tells it to the others, once, before the first exchange().
  __device__ __forceinline__ void publish(Scratch& scratch, float count) const {
    const int lane = threadIdx.x % 32;
    if (blocks == 1) {
      if (lane == 0) scratch.counts[index * warps + warp] = count;
    } else if (lane < static_cast<int>(blocks)) {
      store_remote(shared_address(&scratch.counts[rank * warps + warp]), lane, count);
    }
  }

  // Leaves a warp's values for the others and waits for theirs; entry() has them then. Only where
  // more than a warp shares a row.
  __device__ __forceinline__ void exchange(Scratch& scratch, int parity, float4 values) const {
    const int lane = threadIdx.x % 32;
    if (blocks == 1) {
      if (lane == 0) scratch.sums[parity][index * warps + warp] = values;
      sync();
    } else {
      if (lane < static_cast<int>(blocks)) {
        store_remote(shared_address(&scratch.sums[parity][rank * warps + warp]), lane, values);
      }
      cluster_arrive();
      cluster_wait();
    }
  }
  __device__ __forceinline__ int entries() const { return warps * static_cast<int>(blocks); }
  __device__ __forceinline__ float4 entry(const Scratch& scratch, int parity, int i) const {
    return scratch.sums[parity][blocks == 1 ? index * warps + i : i];
  }
  __device__ __forceinline__ float count(const Scratch& scratch, int i) const {
    return scratch.counts[blocks == 1 ? index * warps + i : i];
  }

  // Both sums over all that share the row; every thread gets them, the same bits. Every warp
  // passes a team's barrier in here, if it has one.
  __device__ __forceinline__ float2 sum(Scratch& scratch, int parity, float a, float b) const {
    a = lanes_sum(a, lanes);
    b = lanes_sum(b, lanes);
    if (entries() == 1) {
      __syncwarp();
      return make_float2(a, b);
    }
    exchange(scratch, parity, make_float4(a, b, 0.0f, 0.0f));
    float2 total = make_float2(0.0f, 0.0f);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < entries(); i += 32) {
      const float4 other = entry(scratch, parity, i);
      total.x += other.x;
      total.y += other.y;
    }
    return make_float2(lanes_reduce<32>(total.x, Sum()), lanes_reduce<32>(total.y, Sum()));
  }
};

}  // namespace tiercel

#endif  // KERNELS_NORM_TEAMS_CUH_
