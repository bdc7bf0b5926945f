// SPDX-License-Identifier: Apache-2.0
// The number of blocks of threads that share a tile's keys.
#ifndef KERNELS_ATTENTION_PAGED_SPLIT_H_
#define KERNELS_ATTENTION_PAGED_SPLIT_H_

#include <cstdint>

namespace tiercel {

inline constexpr int64_t kPagedMostParts = 64;

// The size of a call, as the host knows it.
struct PagedLoad {
  int64_t tiles;         // of all key heads, at most
  int64_t keys;          // that a tile sees, at most
  int64_t tile_n;        // keys of a step
  int64_t result_bytes;  // of a part
};

// 1 where splitting gains nothing.
int64_t paged_parts(const PagedLoad& load, int multiprocessors);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_SPLIT_H_
