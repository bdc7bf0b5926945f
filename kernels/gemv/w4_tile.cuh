// SPDX-License-Identifier: Apache-2.0
// The parts that w4_linear's kernels for many tokens share: the loads of a block's stages, and the
// way from sums in registers to the result.
#ifndef KERNELS_GEMV_W4_TILE_CUH_
#define KERNELS_GEMV_W4_TILE_CUH_

#include <cstdint>

#include "kernels/gemv/w4_epilogue.cuh"
#include "kernels/gemv/w4_tiles_kernels.h"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/load_remote.cuh"
#include "kernels/sm90/tma.cuh"

namespace tiercel {

__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kW4Consumers) : "memory");
}

// Stores four 8x8 matrices, turned. Lane 8 m + r passes the address of column r of matrix m.
__device__ __forceinline__ void store_turned(uint32_t place, const uint32_t (&words)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}

// A block's tile and stages; kValueBytes are those of a value of x.
template <int kTokens_, int kRows_, int kStages_, int kValueBytes>
struct W4Tile {
  static constexpr int kTokens = kTokens_;
  static constexpr int kRows = kRows_;
  static constexpr int kStages = kStages_;
  static constexpr int kXBytes = kTokens * kW4Step * kValueBytes;
  static constexpr int kStageBytes = w4_stage_bytes(kTokens, kRows, kValueBytes);
  static constexpr int kMatrices = kRows / 128;  // of 64 rows, a warpgroup
  static constexpr int kOutRow = kRows * 2 + 16;
  static constexpr int kXBoxes = kValueBytes;  // of rows of 128 bytes
};

// Loads steps `first` to `last`; one thread does.
template <typename Shape>
__device__ __forceinline__ void load_stages(const W4TilesArgs& args, char* shared, uint64_t* filled,
                                            uint64_t* freed, int first, int last, int row,
                                            int token) {
  constexpr int kStages = Shape::kStages, kBoxes = Shape::kXBoxes;
  constexpr int kRowBytes = kW4Step / 2;
  map_prefetch(&args.weight_map);
  map_prefetch(&args.x_map);
  for (int i = first; i < min(first + kStages, last); ++i) {
    box_prefetch(&args.weight_map, i * kRowBytes, row);
  }
  grid_dependency_wait();
  for (int i = first; i < last; ++i) {
    const int turn = i - first, stage = turn % kStages;
    if (turn >= kStages) mbarrier_wait(freed + stage, turn / kStages + 1 & 1);
    char* const to = shared + stage * Shape::kStageBytes;
    mbarrier_expect(filled + stage, Shape::kStageBytes);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      box_load(to + box * (Shape::kXBytes / kBoxes), &args.x_map,
               i * kW4Step + box * (kW4Step / kBoxes), token, filled + stage);
    }
    box_load(to + Shape::kXBytes, &args.weight_map, i * kRowBytes, row, filled + stage);
  }
}

// Adds up the sums of a cluster's blocks and stores the tile. finish(sum, token, bias) is the
// result of a sum before the activation; token 0 is that of the lane's first sum.
template <typename Shape, typename Format, typename Finish>
__device__ __forceinline__ void finish_tile(const W4TilesArgs& args, char* shared,
                                            float (&sums)[Shape::kMatrices][Shape::kTokens / 2],
                                            int my_row, int first_row, int first_token, int blocks,
                                            int rank, const Finish& finish) {
  constexpr int kTokens = Shape::kTokens, kRows = Shape::kRows, kMatrices = Shape::kMatrices;
  const int lane = threadIdx.x % 32;
  consumers_sync();  // every stage was read
  const bool plain = blocks == 1 && args.epilogue.activation == W4Activation::kNone;
  char* const results = shared + (plain ? 0 : kRows * kTokens * 4);
  // Stores 16 tokens: matrices of 8 rows and 8 tokens.
  const auto store = [&](int pair, int row, const float* v) {
    const uint32_t words[4] = {Format::pack(v), Format::pack(v + 2), Format::pack(v + 4),
                               Format::pack(v + 6)};
    const int token = pair * 16 + lane / 16 * 8 + lane % 8;
    const int feature = row - lane / 4 + lane / 8 % 2 * 8;
    store_turned(shared_address(results + token * Shape::kOutRow + feature * 2), words);
  };
  constexpr int kPairs = kTokens / 16;
  if (plain) {
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
      const int row = my_row + m * 64;
      const float low = bias_of<Format>(args.epilogue, first_row + row, args.features);
      const float high = bias_of<Format>(args.epilogue, first_row + row + 8, args.features);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          v[j] = finish(sums[m][pair * 8 + j], pair * 16 + j / 4 * 8 + j % 2,
                        j / 2 % 2 == 0 ? low : high);
        }
        store(pair, row, v);
      }
    }
  } else {
    float4* const parts = reinterpret_cast<float4*>(shared) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kMatrices * kPairs * 2; ++i) {
      const float* s = sums[i / (kPairs * 2)] + i % (kPairs * 2) * 4;
      parts[i * kW4Consumers] = make_float4(s[0], s[1], s[2], s[3]);
    }
    if (blocks > 1) {
      cluster_arrive();
      cluster_wait();
    }
    for (int i = rank; i < kMatrices * kPairs; i += blocks) {
      const int row = my_row + i / kPairs * 64;
      float v[8] = {};
      for (int b = 0; b < blocks; ++b) {
        const float4* from = parts + i * 2 * kW4Consumers;
        const float4 first_part = blocks == 1 ? from[0] : load_remote(from, b);
        const float4 second_part =
            blocks == 1 ? from[kW4Consumers] : load_remote(from + kW4Consumers, b);
        v[0] += first_part.x, v[1] += first_part.y, v[2] += first_part.z, v[3] += first_part.w;
        v[4] += second_part.x, v[5] += second_part.y, v[6] += second_part.z, v[7] += second_part.w;
      }
      const float low = bias_of<Format>(args.epilogue, first_row + row, args.features);
      const float high = bias_of<Format>(args.epilogue, first_row + row + 8, args.features);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        v[j] = activated(args.epilogue.activation, finish(v[j], i % kPairs * 16 + j / 4 * 8 + j % 2,
                                                          j / 2 % 2 == 0 ? low : high));
      }
      store(i % kPairs, row, v);
    }
  }
  if (blocks > 1) cluster_arrive();
  consumers_sync();
  constexpr int kChunks = kRows / 8;  // of 16 bytes, a token
  const bool whole = args.features % 8 == 0;
  for (int i = threadIdx.x; i < kTokens * kChunks; i += kW4Consumers) {
    const int token = i / kChunks, feature = i % kChunks * 8;
    if (first_token + token >= args.tokens || first_row + feature >= args.features) continue;
    if (blocks > 1 && (feature / 64 % kMatrices * (kTokens / 16) + token / 16) % blocks != rank)
      continue;
    const uint4 v = *reinterpret_cast<const uint4*>(results + token * Shape::kOutRow + feature * 2);
    uint16_t* const to =
        args.out + (first_token + token) * int64_t{args.features} + first_row + feature;
    if (whole) {
      *reinterpret_cast<uint4*>(to) = v;
      continue;
    }
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (first_row + feature + j < args.features) {
        to[j] = static_cast<uint16_t>(words[j / 2] >> j % 2 * 16);
      }
    }
  }
  if (blocks > 1) cluster_wait();
}

}  // namespace tiercel

#endif  // KERNELS_GEMV_W4_TILE_CUH_
