// SPDX-License-Identifier: Apache-2.0
// A block of mla_decode: its shared memory, and how its warpgroups wait for each other.
#ifndef KERNELS_MLA_BLOCK_CUH_
#define KERNELS_MLA_BLOCK_CUH_

#include <cstdint>

#include "kernels/mla/mla_kernels.h"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/mbarrier.cuh"

namespace tiercel {

inline constexpr int kConsumers = 256;
inline constexpr int kHalfBlocks = 4;  // blocks of 64 columns of a warpgroup's values

enum NamedBarrier {
  kProbabilities = 1,
  kTaken,
  kQueries,
  kFirstTail,
  kSecondTail,
  kKeyRows,
  kScores,
  kFirstFree,
};

template <int kThreads>
__device__ __forceinline__ void named_sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

template <int kThreads>
__device__ __forceinline__ void named_arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// The value, made again wherever it is used: it has no register in between.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Makes this thread's writes to shared memory visible to wgmma.
__device__ __forceinline__ void proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int kRegisters, bool kMore>
__device__ __forceinline__ void set_registers() {
  if constexpr (kMore) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
}

// The block's shared memory. Each half of a stage, the columns that one of the warpgroups
// multiplies, has barriers of its own; the rotary columns go with the first.
struct Memory {
  uint32_t base;

  __device__ __forceinline__ uint32_t queries() const { return base; }
  __device__ __forceinline__ uint32_t keys(int stage) const {
    return base + (1 + stage) * kMlaTile;
  }
  __device__ __forceinline__ uint32_t full(int half, int stage) const {
    return base + kMlaBarriers + (half * kMlaStages + stage) * 8;
  }
  __device__ __forceinline__ uint32_t empty(int half, int stage) const {
    return full(2 + half, stage);
  }
};

// Steps in the order of their stages.
struct Ring {
  int count = 0;

  __device__ __forceinline__ int stage() const { return count % kMlaStages; }
  __device__ __forceinline__ uint32_t parity() const { return count / kMlaStages & 1; }
};

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The warp has read its part of a stage's half.
__device__ __forceinline__ void release(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(barrier);
}

// Arrives at the barrier of block `rank` of the cluster. It publishes nothing: all that was written
// to the place before has been read by wgmma, behind a proxy fence. A release of the cluster's
// scope would be a fence of the whole GPU.
__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
      " mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Tells both blocks of a pair, if there is one: each loads into both.
__device__ __forceinline__ void release(uint32_t barrier, bool pair) {
  __syncwarp();
  const uint32_t thread = threadIdx.x % 32;
  if (thread <= pair) arrive_at(barrier, cluster_rank() ^ thread);
}

}  // namespace tiercel

#endif  // KERNELS_MLA_BLOCK_CUH_
