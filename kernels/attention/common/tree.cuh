// SPDX-License-Identifier: Apache-2.0
// The keys that a query sees if the new tokens of its sequence are a tree.
#ifndef KERNELS_ATTENTION_COMMON_TREE_CUH_
#define KERNELS_ATTENTION_COMMON_TREE_CUH_

#include <cstdint>

namespace tiercel {

// A row sees the keys before the new tokens from key `first` on, and the new tokens whose bits are
// set.
struct TreeRow {
  uint64_t tokens;
  int first;  // at most the number of keys before the new tokens
};

// `word` says which of `count` new tokens, up to 64, the row sees. There are `old` keys before
// them; fewer than none if there are more new tokens than keys. A window holds the last of the keys
// that the row sees, its own and `left` more; a negative `left` is no limit.
__device__ __forceinline__ TreeRow tree_row(uint64_t word, int count, int old, int left) {
  // Bits of tokens that the sequence does not have, or that have no key, do not count.
  uint64_t tokens = word & ~uint64_t{0} >> (64 - min(max(count, 1), 64));
  tokens = old > -64 ? tokens & ~uint64_t{0} << max(-old, 0) : 0;
  int first = 0;
  if (left >= 0) {
    int behind = max(__popcll(tokens), 1) - 1;
    first = min(old + behind - left, old);
#pragma unroll 1
    for (; behind > left; --behind) tokens &= tokens - 1;
  }
  return {tokens, first};
}

// Bit i: the row sees key `key` + i.
__device__ __forceinline__ uint64_t tree_keys(const TreeRow& row, int old, int key) {
  const int before = old - key, first = row.first - key;
  uint64_t seen = ~uint64_t{0};
  if (before < 64) {
    seen = before > 0     ? ~(seen << before) | row.tokens << before
           : before > -64 ? row.tokens >> -before
                          : 0;
  }
  if (first > 0) seen = first < 64 ? seen >> first << first : 0;
  return seen;
}

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_COMMON_TREE_CUH_
