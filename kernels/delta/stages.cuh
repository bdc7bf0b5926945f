// SPDX-License-Identifier: Apache-2.0
// A pass over the chunks of a sequence: a warpgroup has 64 columns of a head's state in registers,
// transposed, and multiplies by wgmma; one more warpgroup loads chunks ahead of it.
#ifndef KERNELS_DELTA_STAGES_CUH_
#define KERNELS_DELTA_STAGES_CUH_

#include <cstdint>

#include "kernels/delta/delta_kernels.h"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/vector.cuh"
#include "kernels/sm90/warp_matrix.cuh"

namespace tiercel {

inline constexpr int kDeltaPairs = kDeltaChunk / 16;        // of tiles of eight tokens
inline constexpr int kDeltaBlockBytes = kDeltaChunk * 128;  // of 64 columns of a tile
inline constexpr int kDeltaGroup = 128;                     // threads
inline constexpr int kDeltaRuleThreads = kDeltaGroups * kDeltaGroup + kDeltaLoaders;

// True if threads that multiply and threads that load can have so many registers: together at most
// as many as the block was launched with, 168 per thread, or setmaxnreg would wait forever.
constexpr bool delta_registers_fit(int multiply, int load) {
  constexpr int kLaunched = 65536 / kDeltaRuleThreads / 8 * 8;
  return kDeltaGroups * multiply + load <= (kDeltaGroups + 1) * kLaunched &&
         multiply + load <= 2 * kLaunched;
}

template <int kRegisters, bool kMore>
__device__ __forceinline__ void set_registers() {
  if constexpr (kMore) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
}

// By every thread, for what it has itself written or read.
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ float2 load_two(uint32_t place) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(place));
  return pair;
}

// Stages of shared memory that chunks take in turn, and their barriers. A stage is kShared bytes of
// all groups, and 64 columns of a tile for each group. With kSpare, blocks of one group have room
// for one stage more.
template <int kStageCount, int kShared, bool kSpare = false>
struct DeltaRing {
  uint32_t base;
  int groups;

  __device__ __forceinline__ bool spare() const { return kSpare && groups == 1; }
  __device__ __forceinline__ int stages() const { return kStageCount + (spare() ? 1 : 0); }
  __device__ __forceinline__ uint32_t turn(int64_t count) const {
    const auto number = static_cast<uint32_t>(count);
    return spare() ? number / (kStageCount + 1) : number / kStageCount;
  }
  __device__ __forceinline__ int index(int64_t count) const {
    const auto number = static_cast<uint32_t>(count);
    return static_cast<int>(spare() ? number % (kStageCount + 1) : number % kStageCount);
  }
  __device__ __forceinline__ int stage_bytes() const { return kShared + groups * kDeltaBlockBytes; }
  __device__ __forceinline__ uint32_t at(int64_t count) const {
    return base + index(count) * stage_bytes();
  }
  __device__ __forceinline__ uint32_t full(int64_t count) const {
    return base + stages() * stage_bytes() + index(count) * 16;
  }
  __device__ __forceinline__ uint32_t empty(int64_t count) const { return full(count) + 8; }
  __device__ __forceinline__ uint32_t parity(int64_t count) const { return turn(count) & 1; }

  // Initialises the barriers, of which those of full stages expect as many arrivals; returns the
  // thread's warpgroup, of which the last one loads.
  __device__ __forceinline__ int set_up(char* shared, int arrivals = kDeltaLoaders) {
    base = shared_address(shared);
    groups = static_cast<int>(blockDim.x - kDeltaLoaders) / kDeltaGroup;
    if (threadIdx.x == 0) {
      auto* const barriers = reinterpret_cast<uint64_t*>(shared + full(0) - base);
      for (int i = 0; i < stages(); ++i) {
        mbarrier_init(barriers + 2 * i, arrivals);
        mbarrier_init(barriers + 2 * i + 1, groups * kDeltaGroup);
      }
      mbarrier_init_fence();
    }
    __syncthreads();
    return __shfl_sync(kFullWarp, threadIdx.x / kDeltaGroup, 0);
  }
};

// Copies rows of kVectors times 16 bytes into a tile in wgmma's layout, by the threads that load.
// Rows from `rows` on and vectors from `vectors` on are zeros, and above the blocks of 16 x 16 on
// the diagonal of a triangular matrix.
template <int kVectors, bool kTriangle = false>
__device__ __forceinline__ void copy_tile(uint32_t tile, const char* from, int64_t stride, int rows,
                                          int vectors) {
  constexpr int kStep = kDeltaLoaders / kVectors;
  const int thread = threadIdx.x % kDeltaLoaders;
  const int vector = thread % kVectors, first = thread / kVectors;
  uint32_t to = tile + vector / 8 * kDeltaBlockBytes + first * 128 + (vector % 8 ^ first % 8) * 16;
  const char* at = from + first * stride + vector * 16;
#pragma unroll
  for (int row = first; row < kDeltaChunk; row += kStep) {
    const bool real = row < rows && vector < vectors && (!kTriangle || vector < row / 16 * 2 + 2);
    async_copy_16(to, real ? at : from, real);
    to += kStep * 128, at += kStep * stride;
  }
}

// Loads chunks 0 to `chunks` - 1 of a pass, by the threads that load. `copy` starts the copies of
// one, given its number.
template <typename Ring, typename Copy>
__device__ __forceinline__ void load_stages(const Ring& ring, int64_t chunks, Copy copy) {
  const auto publish = [&](int64_t count) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    arrive(ring.full(count));
  };
  // With two stages a chunk is needed before the stage of the next but one is empty: it is waited
  // for at once. With three, a chunk is in flight while the next one is requested.
  const bool at_once = ring.stages() == 2;
#pragma unroll 1
  for (int64_t count = 0; count < chunks; ++count) {
    if (count >= ring.stages()) {
      mbarrier_wait(ring.empty(count), ring.parity(count - ring.stages()));
    }
    copy(count);
    async_copy_commit();
    if (at_once) {
      async_copy_wait<0>();
      publish(count);
    } else if (count > 0) {
      async_copy_wait<1>();
      publish(count - 1);
    }
  }
  if (at_once || chunks == 0) return;
  async_copy_wait<0>();
  publish(chunks - 1);
}

// The place of a thread that multiplies in its columns of the state. Element 4 n + e of a state is
// column across + e / 2 * 8 of the warp's, and row 8 n + along + e % 2.
struct DeltaThread {
  int warp, across, along;

  __device__ __forceinline__ DeltaThread() {
    const int thread = threadIdx.x % kDeltaGroup;
    warp = thread / 32, across = thread % 32 / 4, along = thread % 4 * 2;
  }
  __device__ __forceinline__ int column(int e) const { return warp * 16 + across + e / 2 * 8; }
  __device__ __forceinline__ int row(int tile, int e) const { return tile * 8 + along + e % 2; }
};

// Stores rows of tokens from a transposed result, whose pairs are `words`, by way of the warp's 16
// columns of a tile in shared memory: whole sectors of memory, and a quarter of the instructions of
// stores of 4 bytes, which would take longer than a chunk's first product.
__device__ __forceinline__ void store_rows_by_tile(uint32_t tile, int warp, char* to,
                                                   int64_t stride, int rows,
                                                   const uint32_t (&words)[kDeltaPairs][4]) {
  const int lane = threadIdx.x % 32;
  const auto place = [&](int token, int half) {
    return tile + token * 128 + ((warp * 2 + half) ^ token % 8) * 16;
  };
  __syncwarp();
#pragma unroll
  for (int pair = 0; pair < kDeltaPairs; ++pair) {
    const uint32_t at = place(pair * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(words[pair][0]), "r"(words[pair][1]), "r"(words[pair][2]), "r"(words[pair][3])
                 : "memory");
  }
  __syncwarp();
  // Eight lanes in turn read every second token, so that they meet no bank twice.
  const int first = lane / 16 * 8 + lane % 8 / 2 * 2 + lane / 8 % 2;
  uint32_t vectors[kDeltaPairs][4];
#pragma unroll
  for (int pair = 0; pair < kDeltaPairs; ++pair) {
    uint32_t (&four)[4] = vectors[pair];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four[0]), "=r"(four[1]), "=r"(four[2]), "=r"(four[3])
                 : "r"(place(pair * 16 + first, lane % 2))
                 : "memory");
  }
  to += first * stride + lane % 2 * 16;
#pragma unroll
  for (int pair = 0; pair < kDeltaPairs; ++pair, to += 16 * stride) {
    if (pair * 16 + first < rows) store_vector(to, vectors[pair]);
  }
}

// Stores the warp's 16 rows of a left operand [64, 16 kDepths], rows of as many elements at `to`,
// by way of its columns of a tile as store_rows_by_tile() does.
template <int kDepths>
__device__ __forceinline__ void store_operand_by_tile(uint32_t tile, int warp, char* to,
                                                      const uint32_t (&words)[kDepths][4]) {
  const int lane = threadIdx.x % 32;
  // Vectors of a row lie eight tokens apart, so that eight rows meet no bank twice.
  const auto place = [&](int vector, int half) {
    return tile + (vector * 8 + lane % 8) * 128 + ((warp * 2 + half) ^ lane % 8) * 16;
  };
  to += lane % 8 * kDepths * 32 + lane / 8 * 16;
#pragma unroll
  for (int part = 0; part < kDepths; part += 4) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t (&four)[4] = words[part + i];
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       place(2 * i + lane / 16, lane / 8 % 2)),
                   "r"(four[0]), "r"(four[1]), "r"(four[2]), "r"(four[3])
                   : "memory");
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t vector[4];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(vector[0]), "=r"(vector[1]), "=r"(vector[2]), "=r"(vector[3])
                   : "r"(place(i / 2 * 4 + lane / 8, i % 2))
                   : "memory");
      store_vector(to + i % 2 * 8 * kDepths * 32 + part * 32 + i / 2 * 64, vector);
    }
  }
}

// The values of the warp's columns as left operands, a row of 16 columns a token.
__device__ __forceinline__ void load_values(uint32_t (&values)[kDeltaPairs][4], uint32_t tile,
                                            int warp) {
#pragma unroll
  for (int pair = 0; pair < kDeltaPairs; ++pair) {
    const int lane = threadIdx.x % 32, vector = warp * 2 + lane / 8 % 2;
    const int token = pair * 16 + lane % 8 + lane / 16 * 8;
    load_matrices<true>(values[pair], tile + token * 128 + (vector ^ lane % 8) * 16);
  }
}

}  // namespace tiercel

#endif  // KERNELS_DELTA_STAGES_CUH_
