// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/paged/mixed.h"

#include <algorithm>

#include "kernels/attention/paged/paged.h"
#include "kernels/attention/paged/split.h"
#include "kernels/attention/paged/widened.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

constexpr int64_t kFewRows = 16;    // the most of decode_attention's tiles for a float8 cache
constexpr int64_t kManyTiles = 4;   // from more on, a copy takes less time than widening in tiles
constexpr int64_t kMostGroup = 64;  // query heads of a key head
constexpr int64_t kMostGrid = 65535;

// Pages of a sequence that are copied before tiles read them, where the tiles' blocks copy the
// others. Tiles read the last ones first, and a page takes a warp as long as a tile multiplies
// four.
constexpr int64_t kAhead = 6;

// In microseconds: what tiles of 128 columns, and of 64, take longer for a key of a decoding
// sequence and head, of a whole device; what the further launches take.
constexpr double kKey[] = {0.07e-3, 0.035e-3};
constexpr double kLaunches = 10.0;

}  // namespace

PagedMixed paged_copied(const PagedAttentionCall& call) {
  PagedMixed mixed;
  mixed.batch = call.page_table->shape[0];
  mixed.many = 1;
  mixed.copies = widen_sizes(call);
  mixed.copies.pages *= mixed.batch;
  mixed.before = std::min(mixed.pages(), kMostGrid);
  return mixed;
}

void set_mixed(const PagedMixed& mixed, const AttentionPagedArguments& of_tiles, int32_t queries,
               int multiprocessors, PagedMixedArgs* a) {
  const auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
  a->starts = static_cast<const char*>(of_tiles.starts_q);
  a->lengths = static_cast<const char*>(of_tiles.lengths);
  a->start_step = of_tiles.step_q;
  a->length_step = of_tiles.length_step;
  a->batch = of_tiles.batch;
  a->total = of_tiles.total_q;
  a->capacity = of_tiles.capacity;
  a->queries = queries;
  a->few = narrow(mixed.few);
  a->many = narrow(mixed.many);
  a->pages = narrow(mixed.pages());
  a->ahead = narrow(kAhead);
  a->before = narrow(mixed.before);
  a->many_pages = multiprocessors;
  a->halves = 2 * of_tiles.kv_heads;
}

PagedMixed paged_mixed(const PagedAttentionCall& call, int64_t queries) {
  const TensorView& q = *call.q;
  const int64_t total = q.shape[0], d = q.shape[2], batch = call.page_table->shape[0];
  const int64_t kv_heads = call.k_cache->shape[2], group = q.shape[1] / kv_heads;
  PagedMixed mixed;
  const bool narrow = d >= 16 && d <= 128 && d % 16 == 0 && group <= kMostGroup;
  if (!call.one_head_dimension() || call.k_cache->dtype != DType::kFloat8E4M3 ||
      batch_invariant() || call.tree != nullptr || !narrow || call.max_q / 2 <= total / batch) {
    return mixed;
  }
  // A lower bound of the number of sequences with many new tokens.
  const int64_t chunks = std::min(ceil_div(total, call.max_q), batch), keys = most_keys(call);
  const auto decoded = static_cast<double>((batch - chunks) * keys * kv_heads);
  if (decoded * kKey[d <= 64] < kLaunches) return mixed;
  mixed.few = std::max<int64_t>(kFewRows / group, 1);
  mixed.many = kManyTiles * queries + 1;
  // Others have a new token each, or none: a batch may be padded with sequences.
  mixed.tiles = ceil_div(std::max(total - (batch - chunks), std::min(call.max_q, total)), queries);
  mixed.batch = batch;
  PagedWidenSizes& copies = mixed.copies;
  copies = widen_sizes(call);
  const int64_t of_one = copies.pages;
  copies.pages = 1;
  const int64_t most = kPagedMostCopied / copies.floats();
  const int64_t long_ones = std::min(batch, total / mixed.many);
  copies.pages = call.options.left < 0 ? std::min(long_ones * of_one, most) : 0;
  mixed.before = std::min(copies.pages, kMostGrid);
  return mixed;
}

}  // namespace tiercel
