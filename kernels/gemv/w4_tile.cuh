// SPDX-License-Identifier: Apache-2.0
// Shared by w4_linear's kernels for many tokens: the loads of a block's stages, and the epilogue.
#ifndef KERNELS_GEMV_W4_TILE_CUH_
#define KERNELS_GEMV_W4_TILE_CUH_

#include <cstdint>

#include "kernels/gemv/w4_epilogue.cuh"
#include "kernels/gemv/w4_tiles_kernels.h"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/tma.cuh"

namespace tiercel {

// All warps that multiply.
template <typename Shape>
__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(Shape::kConsumers) : "memory");
}

// Stores four 8x8 matrices, turned. Lane 8 m + r passes the address of column r of matrix m.
__device__ __forceinline__ void store_turned(uint32_t place, const uint32_t (&words)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}

// A block's tile and stages; kValueBytes are those of a value of x. kGroups_ groups of
// kW4Consumers threads take the stages in turn.
template <int kTokens_, int kGroups_, int kStages_, int kTogether_, int kValueBytes>
struct W4Tile {
  static constexpr int kTokens = kTokens_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kStages = kStages_;
  static constexpr int kConsumers = kW4Consumers * kGroups;
  static constexpr int kXBytes = kTokens * kW4Step * kValueBytes;
  static constexpr int kWeightBytes = kW4Rows * (kW4Step / 2);
  static constexpr int kScaleBytes = w4_scale_bytes(kValueBytes);
  static constexpr int kStageBytes = w4_stage_bytes(kTokens, kValueBytes);
  static constexpr int kExchangeBytes = w4_exchange_bytes(kTokens, kGroups);
  static constexpr int kXBoxes = kValueBytes;  // of rows of 128 bytes
  static constexpr int kPairs = kTokens / 16;  // of matrices of 8 tokens
  static constexpr int kDealt = w4_dealt_registers(kTogether_, kGroups, kScaleBytes > 0);
  static constexpr int kLeft = w4_left_registers(kGroups, kScaleBytes > 0);
  static_assert(kGroups <= 2 && kPairs % kGroups == 0);
  // A stage always has the same group: it could take the phase before another's for its own.
  static_assert(kStages % kGroups == 0);
};

// A block's tile and its share of K, which the blocks of a cluster split.
struct W4Share {
  int blocks, rank;
  int first_token, first_row;
  int first, last;  // steps

  __device__ __forceinline__ W4Share(const W4TilesArgs& args, int tokens)
      : blocks(cluster_blocks()), rank(cluster_rank()) {
    const int tile = args.first_tile + blockIdx.x / blocks;
    first_token = tile % args.token_tiles * tokens;
    first_row = tile / args.token_tiles * kW4Rows;
    const int share = (args.steps + blocks - 1) / blocks;
    first = min(rank * share, args.steps);
    last = min(first + share, args.steps);
  }
};

// The barriers of a block's stages, and that of the sums that other blocks send.
template <typename Shape>
struct W4Barriers {
  uint64_t filled[Shape::kStages], freed[Shape::kStages];
  uint64_t received;

  // All threads call this.
  __device__ __forceinline__ void init(const W4Share& share) {
    if (threadIdx.x == 0) {
      for (int s = 0; s < Shape::kStages; ++s) {
        mbarrier_init(filled + s, Shape::kScaleBytes > 0 ? 2 : 1);
        mbarrier_init(freed + s, kW4Consumers / 32);
      }
      mbarrier_init(&received, 1);
      mbarrier_init_fence();
      const int pairs = (Shape::kPairs - share.rank + share.blocks - 1) / share.blocks;
      if (share.blocks > 1) mbarrier_expect(&received, (share.blocks - 1) * pairs * kW4PartBytes);
    }
    __syncthreads();
  }
};

// Takes the registers that the loader's warpgroup gives away.
template <typename Shape>
__device__ __forceinline__ void take_registers() {
  if constexpr (Shape::kDealt > 0) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::kDealt));
  }
}

// Loads the share's steps; one thread does.
template <typename Shape>
__device__ __forceinline__ void load_stages(const W4TilesArgs& args, const W4Share& share,
                                            char* shared, W4Barriers<Shape>& barriers) {
  constexpr int kBoxes = Shape::kXBoxes;
  constexpr int kRowBytes = kW4Step / 2;
  const int first = share.first, last = share.last;
  map_prefetch(&args.weight_map);
  map_prefetch(&args.x_map);
#pragma unroll 1
  for (int i = first; i < min(first + Shape::kStages, last); ++i) {
    box_prefetch(&args.weight_map, i * kRowBytes, share.first_row);
  }
  grid_dependency_wait();
  int stage = 0;
  uint32_t parity = 1;
#pragma unroll 1  // the loader has few registers
  for (int i = first; i < last; ++i) {
    mbarrier_wait(barriers.freed + stage, parity);  // at once, the first time
    uint64_t* const filled = barriers.filled + stage;
    char* const to = shared + stage * Shape::kStageBytes;
    mbarrier_expect(filled, Shape::kStageBytes - Shape::kScaleBytes);
    box_load(to + Shape::kXBytes, &args.weight_map, i * kRowBytes, share.first_row, filled);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      box_load(to + box * (Shape::kXBytes / kBoxes), &args.x_map,
               i * kW4Step + box * (kW4Step / kBoxes), share.first_token, filled);
    }
    if (++stage == Shape::kStages) stage = 0, parity ^= 1;
  }
}

// Joins the cluster's barrier by which finish_tile() knows that no block reads its stages any more.
// All reads were used, so that no memory has to be made visible.
__device__ __forceinline__ void stages_were_read() {
  cluster_arrive_relaxed();
  cluster_wait();
}

// All that the threads behind those that multiply do. One loads; warps 0, 1 and 2 behind its warp
// call others(warp).
template <typename Shape, typename Others>
__device__ __forceinline__ void run_loader(const W4TilesArgs& args, const W4Share& share,
                                           char* shared, W4Barriers<Shape>& barriers,
                                           const Others& others) {
  if (Shape::kDealt > 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::kLeft));
  }
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) - Shape::kConsumers / 32;
  if (warp > 0) {
    others(warp - 1);
  } else if (threadIdx.x == Shape::kConsumers) {
    load_stages<Shape>(args, share, shared, barriers);
  }
  __syncwarp();
  if (share.blocks > 1) stages_were_read();
}

// Adds up the sums of a block's groups and of a cluster's blocks, both in order, and stores the
// tile. finish(sum, token, bias) is the result of a sum before the activation; token 0 is that of
// the lane's first sum.
template <typename Shape, typename Format, typename Finish>
__device__ __forceinline__ void finish_tile(const W4TilesArgs& args, char* shared,
                                            W4Barriers<Shape>& barriers,
                                            float (&sums)[Shape::kTokens / 2], int my_row,
                                            const Finish& finish) {
  constexpr int kPairs = Shape::kPairs, kGroups = Shape::kGroups;
  constexpr int kMine = kPairs / kGroups;     // pairs that a thread keeps
  const W4Share share(args, Shape::kTokens);  // again, for want of registers
  const int blocks = share.blocks, rank = share.rank;
  const int lane = threadIdx.x % 32, place = threadIdx.x % kW4Consumers;
  const int group = threadIdx.x / kW4Consumers;
  consumers_sync<Shape>();  // every stage was read
  float mine[kMine * 8];
  if constexpr (kGroups == 1) {
#pragma unroll
    for (int i = 0; i < kMine * 8; ++i) mine[i] = sums[i];
  } else {
    // Each group hands the other one half of the tokens.
    float4* const to = reinterpret_cast<float4*>(shared) + threadIdx.x;
    const float4* const from =
        reinterpret_cast<const float4*>(shared) + (threadIdx.x ^ kW4Consumers);
#pragma unroll
    for (int i = 0; i < kMine * 2; ++i) {
      const float* const s = sums + i * 4;
      constexpr int kOther = kMine * 8;
      to[i * Shape::kConsumers] =
          group == 0 ? make_float4(s[kOther], s[kOther + 1], s[kOther + 2], s[kOther + 3])
                     : make_float4(s[0], s[1], s[2], s[3]);
    }
    consumers_sync<Shape>();
#pragma unroll
    for (int i = 0; i < kMine * 2; ++i) {
      const float4 other = from[i * Shape::kConsumers];
      const float others[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        mine[i * 4 + j] = (group == 0 ? sums[i * 4 + j] : sums[kMine * 8 + i * 4 + j]) + others[j];
      }
    }
  }
  const int first_pair = group * kMine;
  const bool plain = blocks == 1 && args.epilogue.activation == W4Activation::kNone;
  const int places = plain ? kPairs : (kPairs + blocks - 1) / blocks;  // pairs of this block
  char* const parts = shared + Shape::kExchangeBytes;
  char* const results = parts + (plain ? 0 : blocks * places * kW4PartBytes);
  const int row = share.first_row + my_row;
  const float low = bias_of<Format>(args.epilogue, row, args.features);
  const float high = bias_of<Format>(args.epilogue, row + 8, args.features);
  // Stores 16 tokens: matrices of 8 rows and 8 tokens.
  const auto store = [&](int pair, const float* v) {
    const uint32_t words[4] = {Format::pack(v), Format::pack(v + 2), Format::pack(v + 4),
                               Format::pack(v + 6)};
    const int token = pair * 16 + lane / 16 * 8 + lane % 8;
    const int feature = my_row - lane / 4 + lane / 8 % 2 * 8;
    store_turned(shared_address(results + token * kW4ResultRow + feature * 2), words);
  };
  if (blocks > 1) stages_were_read();
  if (plain) {
#pragma unroll
    for (int pair = 0; pair < kMine; ++pair) {
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        v[j] = finish(mine[pair * 8 + j], (first_pair + pair) * 16 + j / 4 * 8 + j % 2,
                      j / 2 % 2 == 0 ? low : high);
      }
      store(first_pair + pair, v);
    }
  } else {
    // Block i adds up pairs i, i + blocks and so on: it is sent those sums.
    float4* const part = reinterpret_cast<float4*>(parts) + place;
    int owner = first_pair % blocks, at = first_pair / blocks;
#pragma unroll
    for (int pair = 0; pair < kMine; ++pair) {
      const float* const s = mine + pair * 8;
      const float4 halves[2] = {make_float4(s[0], s[1], s[2], s[3]),
                                make_float4(s[4], s[5], s[6], s[7])};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float4* const to = part + ((rank * places + at) * 2 + i) * kW4Consumers;
        if (owner == rank) {
          *to = halves[i];
        } else {
          send_remote(to, &barriers.received, owner, halves[i]);
        }
      }
      if (++owner == blocks) owner = 0, ++at;
    }
    consumers_sync<Shape>();
    if (blocks > 1) mbarrier_wait_cluster(&barriers.received, 0);
    for (int i = group; i < places; i += kGroups) {
      const int pair = i * blocks + rank;
      if (pair >= kPairs) break;
      float v[8] = {};
      const float4* from = part + i * 2 * kW4Consumers;
#pragma unroll 4
      for (int b = 0; b < blocks; ++b, from += places * 2 * kW4Consumers) {
        const float4 first_part = from[0], second_part = from[kW4Consumers];
        v[0] += first_part.x, v[1] += first_part.y, v[2] += first_part.z, v[3] += first_part.w;
        v[4] += second_part.x, v[5] += second_part.y, v[6] += second_part.z, v[7] += second_part.w;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        v[j] = activated(args.epilogue.activation,
                         finish(v[j], pair * 16 + j / 4 * 8 + j % 2, j / 2 % 2 == 0 ? low : high));
      }
      store(i, v);
    }
  }
  consumers_sync<Shape>();
  constexpr int kChunks = kW4Rows / 8;  // of 16 bytes, a token
  const bool whole = args.features % 8 == 0;
  for (int i = threadIdx.x; i < places * 16 * kChunks; i += Shape::kConsumers) {
    const int slot = i / kChunks, feature = share.first_row + i % kChunks * 8;
    const int pair = slot / 16 * blocks + rank;
    const int token = share.first_token + pair * 16 + slot % 16;
    if (pair >= kPairs || token >= args.tokens || feature >= args.features) continue;
    const uint4 v =
        *reinterpret_cast<const uint4*>(results + slot * kW4ResultRow + i % kChunks * 16);
    uint16_t* const to = args.out + token * int64_t{args.features} + feature;
    if (whole) {
      *reinterpret_cast<uint4*>(to) = v;
      continue;
    }
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (feature + j < args.features) {
        to[j] = static_cast<uint16_t>(words[j / 2] >> j % 2 * 16);
      }
    }
  }
}

}  // namespace tiercel

#endif  // KERNELS_GEMV_W4_TILE_CUH_
