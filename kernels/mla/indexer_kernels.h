// SPDX-License-Identifier: Apache-2.0
// The interface of indexer_logits' host and device code.
#ifndef KERNELS_MLA_INDEXER_KERNELS_H_
#define KERNELS_MLA_INDEXER_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"

namespace tiercel {

inline constexpr int kIndexerColumns = 128;  // of a query and of a key, a byte each
inline constexpr int kIndexerRows = 256;     // of a block: tokens times heads
inline constexpr int kIndexerKeys = 64;      // of a tile
inline constexpr int kIndexerStages = 8;
inline constexpr int kIndexerThreads = 384;  // two warpgroups that multiply, one that loads
inline constexpr int kIndexerTile = kIndexerKeys * kIndexerColumns;
inline constexpr int kIndexerQueries = kIndexerRows * kIndexerColumns;

// Shared memory in bytes: queries, tiles of keys, weights, barriers.
inline constexpr int kIndexerWeights = kIndexerQueries + kIndexerStages * kIndexerTile;
inline constexpr int kIndexerBarriers = kIndexerWeights + kIndexerRows * 4;
inline constexpr uint32_t kIndexerShared = kIndexerBarriers + (2 * kIndexerStages + 1) * 8;

struct IndexerArgs {
  const float* k_scale;  // [keys]
  const float* weights;  // [tokens, heads]
  // Keys of a token: clamped to what there is.
  const int32_t* starts;   // or null: 0
  const int32_t* ends;     // or null: all
  float* out;              // [tokens, keys]
  int64_t weights_stride;  // elements
  int64_t out_stride;
  int64_t starts_step;
  int64_t ends_step;
  int tokens;
  int keys;
  int tiles;  // of a block, at most
};

struct IndexerKernel {
  int heads;
  Kernel kernel;
};

const IndexerKernel* indexer_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_MLA_INDEXER_KERNELS_H_
