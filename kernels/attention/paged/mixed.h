// SPDX-License-Identifier: Apache-2.0
// Calls over a float8 cache whose keys and values are copied to 16 bits, for tiles that read them
// many times, or with decoding sequences beside chunks of prompts: decode_attention's kernels take
// the former, tiles the latter. Lengths are on the GPU, so a kernel of one block divides the
// sequences.
#ifndef KERNELS_ATTENTION_PAGED_MIXED_H_
#define KERNELS_ATTENTION_PAGED_MIXED_H_

#include <vector_types.h>

#include <cstdint>

#include "kernels/attention/paged/kernels.h"
#include "kernels/attention/paged/widen.h"
#include "kernels/sm90/launch.h"

namespace tiercel {

inline constexpr int kPagedMixedThreads = 1024;

struct PagedAttentionCall;

struct PagedMixed {
  int64_t batch = 0;   // 0: the tiles have all sequences and read the cache
  int64_t few = 0;     // the most new tokens of a decoding sequence; 0: there is none
  int64_t many = 0;    // the fewest of a sequence whose keys are copied
  int64_t tiles = 0;   // of a key head, as the host expects
  int64_t before = 0;  // pages, of all sequences, that are copied before the tiles' kernel
  PagedWidenSizes copies;

  int64_t pages() const { return copies.pages; }
  int64_t states() const { return 2 * pages() * copies.kv_heads; }
  // Floats of the workspace: the copies, sources, states, first tiles and first pages.
  int64_t floats() const {
    return copies.floats() + (4 * before + states() + 2 * batch + 4) / 4 * 4;
  }
};

struct PagedMixedArgs {
  const char* starts;    // of sequences, batch + 1 of them, of any contents
  const char* lengths;   // of sequences
  int4* sources;         // [before]: as PagedWidenArgs has them
  int32_t* states;       // [pages, 2 * key heads]: 2 if copied before, or 0
  int32_t* tile_starts;  // [batch + 1]: each sequence's first tile; those with few tokens have none
  int32_t* copied;       // [batch]: the first page of a sequence's copies, or -1
  int32_t start_step;    // bytes
  int32_t length_step;
  int32_t batch;
  int32_t total;     // rows of q
  int32_t capacity;  // keys of a sequence, at most
  int32_t queries;   // of a tile
  int32_t few, many, pages;
  int32_t ahead;  // pages copied before the tiles of a sequence that copy the others: the last ones
  int32_t before;      // of all sequences, at most
  int32_t many_pages;  // the fewest of a sequence of which tiles copy some
  int32_t halves;      // keys and values of a page: 2 * key heads
};

struct PagedMixedKernel {
  Kernel kernel;
};

const PagedMixedKernel* paged_mixed_kernels(int* count);

// A call that fits together and is not empty, with decoding sequences beside chunks; of no batch
// where one program is faster for all sequences. A tile has `queries`.
PagedMixed paged_mixed(const PagedAttentionCall& call, int64_t queries);

// Copies of the keys of all sequences.
PagedMixed paged_copied(const PagedAttentionCall& call);

void set_mixed(const PagedMixed& mixed, const AttentionPagedArguments& of_tiles, int32_t queries,
               int multiprocessors, PagedMixedArgs* a);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_MIXED_H_
