// SPDX-License-Identifier: Apache-2.0
// The interface of paged_wide.cu: head dimensions from 264 to 512.
#ifndef KERNELS_ATTENTION_PAGED_WIDE_H_
#define KERNELS_ATTENTION_PAGED_WIDE_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kWideColumns = 512;  // of the tiles; what a head has less is zeros
inline constexpr int kWideRows = 64;      // of a block of threads
inline constexpr int kWideStep = 64;      // keys
inline constexpr int kWideThreads = 512;  // three warpgroups that multiply, one that loads
inline constexpr int kWideLeastBox = 8;   // keys of a copy by TMA; rows of smaller pages are copied

// Shared memory of a block, in bytes: queries; keys and values, in halves of 256 columns; shares
// and factors of a step's rows; barriers of the halves.
inline constexpr int kWideHalves = 4;
inline constexpr int kWideHalf = kWideStep * kWideColumns;  // 256 columns of 2 bytes
inline constexpr int kWideKeys = 2 * kWideHalf;
inline constexpr int kWideShares = kWideKeys + kWideHalves * kWideHalf;
inline constexpr int kWideFactors = kWideShares + kWideRows * kWideStep * 2;
inline constexpr int kWideBarriers = kWideFactors + 128 * 8;
inline constexpr uint32_t kWideShared = kWideBarriers + 2 * kWideHalves * 8;
static_assert(kWideShared <= 227 << 10);

// Keys or values: what a tensor map of [rows, heads, columns] says, for copies without it.
struct PagedWideCache {
  const char* data;
  int64_t row;   // bytes, from a row to the next
  int64_t head;  // the same
};

struct PagedWideArgs {
  const char* q;
  char* out;             // where parts go, if keys are split
  char* result;          // whose rows are 0 where no sequence has them
  float* lse;            // [parts * heads, total], or null
  const float* sinks;    // [heads], or null
  const char* tree;      // [total] words of 64 bits, or null; bit j: the row sees new token j
  const char* prefixes;  // of sequences: keys that all of its queries see; or null
  const float* k_scale;  // of a float8 cache, for each head or all of them; or null: 1
  const float* v_scale;
  // Contents are not trusted: each value is clamped where it is read.
  const char* starts;
  const char* lengths;
  const char* table;
  PagedWideCache cache[2];    // keys, values
  int64_t q_strides[2];       // bytes: row, head
  int64_t out_strides[2];     // the same
  int64_t result_strides[2];  // the same
  int64_t table_row;          // bytes, from a sequence's pages to the next one's
  int32_t start_step;         // bytes
  int32_t length_step;
  int32_t table_step;
  int32_t tree_step;
  int32_t prefix_step;
  int32_t k_scale_step;  // elements, from a head to the next: 0 or 1
  int32_t v_scale_step;
  int batch;
  int total;      // rows of q
  int heads;      // of q
  int kv_heads;   // of the cache
  int group;      // heads of q for one of the cache
  int columns;    // of a head
  int queries;    // of a block's tile
  int tiles;      // of a key head
  int parts;      // of a tile's keys, at most
  int part_keys;  // of a part, a multiple of a step; 0: parts are even shares
  int left;       // keys that a query sees before its own, and behind it
  int right;
  int capacity;   // keys of a sequence that the table has room for
  int page_bits;  // log2 of a page's keys
  int page_rows;  // of the maps, from a page to the next
  int last_page;  // what any other entry of the table counts as
  int copy_rows;  // keys of a copy
  bool split;     // a second kernel follows
  float scale;    // of scores, to powers of 2; of capped ones, if `slope`
  float slope;    // of scores before the cap's tangent, or 0
};

struct PagedWideKernel {
  DType dtype;
  bool float8;  // the cache
  Kernel kernel;
};

const PagedWideKernel* paged_wide_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_PAGED_WIDE_H_
