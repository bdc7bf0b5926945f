// SPDX-License-Identifier: Apache-2.0
// The number of blocks of threads that share a tile's keys, and its fixed parts in the
// batch-invariant mode.
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

// The time of a call, in steps of a block of threads.
double paged_time(const PagedLoad& load, int64_t parts, int multiprocessors);

inline constexpr int64_t kPagedMostCopied = int64_t{1} << 27;  // floats of copies: 512 MiB

// The number of key heads of a float8 cache, of `heads`, that are copied to 16 bits at once before
// tiles of `d` columns read them; 0 where a call of `steps` is faster if it widens what it reads.
// The copies of a head take `floats`, at least one.
int64_t paged_widened_heads(double steps, int64_t d, int64_t floats, int64_t heads);

// Keys of a part in the batch-invariant mode, and the most parts (the last one has the rest):
// kernel.py has 8 bits for a part's number.
inline constexpr int64_t kPagedPartKeys = 2048;
inline constexpr int64_t kPagedMostFixedParts = 255;

// The fixed parts of a tile: of the first `keys` keys, or of a window that spans `span` of them.
int64_t paged_fixed_parts(int64_t keys, int64_t span);

// True if one block should have all of a tile's parts, rather than a block each part.
bool paged_chains(const PagedLoad& load, int64_t parts, int multiprocessors);

// How many key heads a launch has, of `heads`, so that the results of its parts fit the workspace.
// `rows` are those of a key head, `tiles` the same.
int64_t paged_heads_at_once(int64_t heads, int64_t rows, int64_t d, int64_t tiles, int64_t parts);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_SPLIT_H_
