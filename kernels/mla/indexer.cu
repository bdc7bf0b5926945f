// SPDX-License-Identifier: Apache-2.0
// indexer_logits: the scores of sparse attention's indexer for each token and key.
//
// A block has 256 rows, tokens times heads, whose queries it keeps in shared memory, and loops over
// tiles of 64 keys. The two consumer warpgroups have a tile each: keys times queries, 64 x 256, so
// that all heads of a key are in the four lanes of a quad, which add them up without shared memory;
// while one adds, the other multiplies. The third warpgroup loads, by TMA. Tiles that no token of
// the block sees are filled without a product.
#include <cuda.h>

#include <cstdint>

#include "kernels/mla/block.cuh"
#include "kernels/mla/indexer_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/tma.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace tiercel {
namespace {

// Keys [first, last) that a token sees.
struct Range {
  int first, last;
};

__device__ __forceinline__ Range range_of(const IndexerArgs& args, int token) {
  Range range = {0, args.keys};
  if (token >= args.tokens) return {0, 0};
  if (args.starts != nullptr) range.first = max(args.starts[token * args.starts_step], 0);
  if (args.ends != nullptr) range.last = min(args.ends[token * args.ends_step], args.keys);
  return range;
}

template <int kHeads>
struct Block {
  static constexpr int kTokens = kIndexerRows / kHeads;

  int token;         // the first
  int first, last;   // tiles
  int seen, beyond;  // those that a token sees

  __device__ __forceinline__ explicit Block(const IndexerArgs& args) {
    token = blockIdx.x * kTokens;
    first = blockIdx.y * args.tiles;
    last = min(first + args.tiles, (args.keys + kIndexerKeys - 1) / kIndexerKeys);
    int low = args.keys, high = 0;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const Range range = range_of(args, token + i);
      if (range.first >= range.last) continue;
      low = min(low, range.first), high = max(high, range.last);
    }
    seen = min(max(low / kIndexerKeys, first), last);
    beyond = max(min((high + kIndexerKeys - 1) / kIndexerKeys, last), seen);
  }
};

// Sums over a quad: of a lane's kTokens numbers, the kTokens / 4 that begin at lane % 4 * kTokens /
// 4 of all lanes together.
template <int kTokens>
__device__ __forceinline__ void quad_sums(float (&x)[kTokens]) {
#pragma unroll
  for (int half = kTokens / 2, lanes = 2; lanes > 0; half /= 2, lanes /= 2) {
    const bool upper = (threadIdx.x & lanes) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float other = __shfl_xor_sync(kFullWarp, upper ? x[i] : x[i + half], lanes);
      x[i] = (upper ? x[i + half] : x[i]) + other;
    }
  }
}

// Minus infinity for the block's tokens in the tiles [from, to), by both multiplying warpgroups.
template <int kTokens>
__device__ __forceinline__ void fill(const IndexerArgs& args, int token, int from, int to) {
  const int end = min(to * kIndexerKeys, args.keys);
  for (int i = 0; i < kTokens && token + i < args.tokens; ++i) {
    float* const row = args.out + (token + i) * args.out_stride;
    for (int key = from * kIndexerKeys + threadIdx.x; key < end; key += 256) row[key] = -INFINITY;
  }
}

template <int kHeads>
__device__ __forceinline__ void multiply(const IndexerArgs& args, const Block<kHeads>& block,
                                         unsigned char* memory) {
  constexpr int kTokens = Block<kHeads>::kTokens, kOwn = kTokens / 4;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 4;
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(memory + kIndexerBarriers);
  const float2* const weights = reinterpret_cast<const float2*>(memory + kIndexerWeights) + lane;
  const uint32_t queries = shared_address(memory);
  Range ranges[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) ranges[i] = range_of(args, block.token + lane * kOwn + i);
  const int row = thread / 32 * 16 + thread % 32 / 4;
  float d[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) d[i] = 0.0f;
  mbarrier_wait(barriers + 2 * kIndexerStages, 0);
  for (int tile = block.seen + group; tile < block.beyond; tile += 2) {
    const int count = tile - block.seen, stage = count % kIndexerStages;
    const int key = tile * kIndexerKeys + row;
    const float scales[2] = {key < args.keys ? args.k_scale[key] : 0.0f,
                             key + 8 < args.keys ? args.k_scale[key + 8] : 0.0f};
    mbarrier_wait(barriers + stage, count / kIndexerStages & 1);
    const uint32_t keys = queries + kIndexerQueries + stage * kIndexerTile;
    wgmma_settle(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kIndexerColumns / 32; ++k) {
      wgmma_float8_256(d, rows_descriptor(keys + k * 32), rows_descriptor(queries + k * 32), k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(d);
    __syncwarp();
    if (thread % 32 == 0) mbarrier_arrive(barriers + kIndexerStages + stage);

    float sums[2][kTokens];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      sums[0][i] = sums[1][i] = 0.0f;
#pragma unroll
      for (int j = 0; j < kHeads / 8; ++j) {
        const int at = i * (kHeads / 8) + j;
        const float2 weight = weights[4 * at];
        const float* const x = d + 4 * at;
        sums[0][i] = fmaf(fmaxf(x[0], 0.0f), weight.x, sums[0][i]);
        sums[0][i] = fmaf(fmaxf(x[1], 0.0f), weight.y, sums[0][i]);
        sums[1][i] = fmaf(fmaxf(x[2], 0.0f), weight.x, sums[1][i]);
        sums[1][i] = fmaf(fmaxf(x[3], 0.0f), weight.y, sums[1][i]);
      }
    }
#pragma unroll
    for (int other = 0; other < 2; ++other) {
      quad_sums(sums[other]);
      const int at = key + 8 * other;
      if (at >= args.keys) continue;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int token = block.token + lane * kOwn + i;
        if (token >= args.tokens) continue;
        const bool sees = at >= ranges[i].first && at < ranges[i].last;
        args.out[token * args.out_stride + at] = sees ? sums[other][i] * scales[other] : -INFINITY;
      }
    }
    __syncwarp();
  }
}

template <int kHeads>
__global__ void __launch_bounds__(kIndexerThreads, 1)
    indexer_logits(const __grid_constant__ IndexerArgs args,
                   const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap k_map) {
  extern __shared__ __align__(1024) unsigned char memory[];
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(memory + kIndexerBarriers);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kIndexerStages; ++i) mbarrier_init(barriers + i, 1);
    for (int i = kIndexerStages; i < 2 * kIndexerStages; ++i) mbarrier_init(barriers + i, 4);
    mbarrier_init(barriers + 2 * kIndexerStages, 1);
    mbarrier_init_fence();
    map_prefetch(&q_map);
    map_prefetch(&k_map);
  }
  grid_dependency_wait();
  grid_dependency_launch();
  const Block<kHeads> block(args);
  if (threadIdx.x < kIndexerRows) {
    const int token = block.token + threadIdx.x / kHeads;
    const float weight = token < args.tokens
                             ? args.weights[token * args.weights_stride + threadIdx.x % kHeads]
                             : 0.0f;
    reinterpret_cast<float*>(memory + kIndexerWeights)[threadIdx.x] = weight;
  }
  __syncthreads();
  if (threadIdx.x >= 256) {
    set_registers<40, false>();
    if (threadIdx.x != 256 || block.seen == block.beyond) return;
    mbarrier_expect(barriers + 2 * kIndexerStages, kIndexerQueries);
    box_load(memory, &q_map, 0, block.token * kHeads, barriers + 2 * kIndexerStages);
    for (int tile = block.seen; tile < block.beyond; ++tile) {
      const int count = tile - block.seen, stage = count % kIndexerStages;
      mbarrier_wait(barriers + kIndexerStages + stage, count / kIndexerStages & 1 ^ 1);
      mbarrier_expect(barriers + stage, kIndexerTile);
      box_load(memory + kIndexerQueries + stage * kIndexerTile, &k_map, 0, tile * kIndexerKeys,
               barriers + stage);
    }
    return;
  }
  set_registers<232, true>();
  fill<Block<kHeads>::kTokens>(args, block.token, block.first, block.seen);
  fill<Block<kHeads>::kTokens>(args, block.token, block.beyond, block.last);
  if (block.seen < block.beyond) multiply<kHeads>(args, block, memory);
}

#define TIERCEL_INDEXER(heads)                 \
  {heads, Kernel("indexer_logits<" #heads ">", \
                 reinterpret_cast<const void*>(indexer_logits<heads>), kIndexerShared)}

const IndexerKernel kKernels[] = {TIERCEL_INDEXER(32), TIERCEL_INDEXER(64)};

}  // namespace

const IndexerKernel* indexer_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
