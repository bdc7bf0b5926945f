// SPDX-License-Identifier: Apache-2.0
// paged_attention for head dimensions from 264 to 512.
//
// A block has 64 rows, the heads of one key head for as many queries of a sequence as fit, and goes
// through the keys in steps of 64. Of its four warpgroups
//   the first multiplies queries and keys (64 x 64, along 512) and makes probabilities of the
//     scores, while
//   the second and the third multiply those of the step before by 256 columns of the values each;
//   the fourth loads: a warp has one half of the columns of keys or of values.
// Queries take 64 KiB of shared memory, a step's keys and values 128: there is room for one step.
// Each half is loaded again as soon as it has been multiplied.
//
// Rows of a float8 cache are converted to 16 bits by the warps that load them.
//
// Tiles are numbered as kernel.py does, and a block takes one after the other. A tile's keys may be
// split among blocks; paged_combine puts the parts together.
#include <cstdint>

#include "kernels/attention/common/tree.cuh"
#include "kernels/attention/paged/wide.h"
#include "kernels/mla/block.cuh"
#include "kernels/mla/rows.cuh"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/tma.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace tiercel {
namespace {

constexpr int kBlock = kMlaBlock;       // 64 rows of 64 columns
constexpr int kRowBytes = kMlaColumns;  // of those columns

// Registers of a thread: all four warpgroups have as many as four times the 128 of the launch.
constexpr int kScoreRegisters = 104;
constexpr int kValueRegisters = 176;
constexpr int kLoadRegisters = 56;
static_assert(kScoreRegisters + 2 * kValueRegisters + kLoadRegisters <= 4 * 128);

constexpr int kTakers = 384;  // threads of the three warpgroups that share probabilities
constexpr int kPieces = 2;  // of 128 columns, of a warpgroup's 256: ptxas gives a product of all of
                            // them no more registers than the launch has
static_assert(kWideStep == kMlaStep && kWideRows == kMlaRows);

// Addresses in shared memory. Halves 0 and 1 are of keys, 2 and 3 of values.
struct WideMemory {
  uint32_t base;

  __device__ __forceinline__ uint32_t half(int at) const {
    return base + kWideKeys + at * kWideHalf;
  }
  __device__ __forceinline__ uint32_t full(int at) const { return base + kWideBarriers + at * 8; }
  __device__ __forceinline__ uint32_t empty(int at) const { return full(kWideHalves + at); }
};

__device__ __forceinline__ int start_of(const PagedWideArgs& args, int entry) {
  const char* at = args.starts + static_cast<int64_t>(args.start_step) * entry;
  return min(max(*reinterpret_cast<const int32_t*>(at), 0), args.total);
}

__device__ __forceinline__ int32_t length_at(const PagedWideArgs& args, int entry) {
  const char* at = args.lengths + static_cast<int64_t>(args.length_step) * entry;
  return min(max(*reinterpret_cast<const int32_t*>(at), 0), args.capacity);
}

// The row of the maps that a key of a sequence has.
__device__ __forceinline__ int row_of(const PagedWideArgs& args, const char* table, int key) {
  const int64_t offset = static_cast<int64_t>(args.table_step) * (key >> args.page_bits);
  const int entry = *reinterpret_cast<const int32_t*>(table + offset);
  const int page = entry < 0 || entry > args.last_page ? args.last_page : entry;
  return page * args.page_rows + (key & ((1 << args.page_bits) - 1));
}

// The tiles of a block, one after the other. Whole warps use it, and all find the
// same.
struct Tiles {
  int turn = 0, parts;
  // State of the present tile.
  int entry;        // the sequence
  int kv_head;      //
  int part;         // of the keys
  int start;        // the first row of q that the sequence has
  int queries;      // of the sequence
  int query;        // the block's first one
  int keys;         // of the sequence
  int prefix;       // of these, that all queries see
  int first, last;  // the part's steps

  __device__ __forceinline__ explicit Tiles(const PagedWideArgs& args) : parts(args.parts) {
    if (args.part_keys == 0) return;
    // The longest sequence sets the number.
    int longest = 0;
    for (int at = threadIdx.x % 32; at < args.batch; at += 32) {
      longest = max(longest, length_at(args, at));
    }
    longest = __reduce_max_sync(kFullWarp, longest);
    parts = min(max((longest + args.part_keys - 1) / args.part_keys, 1), parts);
  }

  // Goes to the next tile that has queries; false behind the last.
  __device__ __forceinline__ bool next(const PagedWideArgs& args) {
    const int blocks = gridDim.x, block = blockIdx.x;
    for (;; ++turn) {
      // Rounds alternate in direction: later tiles of a sequence see more keys.
      const int64_t at =
          static_cast<int64_t>(turn) * blocks + (turn % 2 == 1 ? blocks - 1 - block : block);
      if (static_cast<int64_t>(turn) * blocks >= total(args)) return false;
      if (at >= total(args)) continue;
      const int whole = static_cast<int>(at / parts);
      part = static_cast<int>(at % parts);
      kv_head = whole % args.kv_heads;
      const int slot = args.tiles - 1 - whole / args.kv_heads;
      entry = find(args, slot);
      start = start_of(args, entry);
      queries = start_of(args, entry + 1) - start;
      query = (slot - first_slot(args, entry)) * args.queries;
      if (query < 0 || query >= queries) continue;
      set_steps(args);
      ++turn;
      return true;
    }
  }

  __device__ __forceinline__ bool any() const { return first < last; }

  __device__ __forceinline__ int old() const { return keys - queries; }

  // The key behind those that a query of the sequence sees, and the first one. With a tree a query
  // may see any new token, and as few of them as the first query.
  __device__ __forceinline__ int end_of(const PagedWideArgs& args, int at) const {
    return args.tree != nullptr ? keys : min(keys, max(at + old() + args.right + 1, prefix));
  }
  __device__ __forceinline__ int begin_of(const PagedWideArgs& args, int at) const {
    return (args.tree != nullptr ? 0 : at) + old() - args.left;
  }

 private:
  __device__ __forceinline__ int64_t total(const PagedWideArgs& args) const {
    return static_cast<int64_t>(args.tiles) * args.kv_heads * parts;
  }

  // The number of a sequence's first tile: each has at least the numbers that its queries need.
  static __device__ __forceinline__ int first_slot(const PagedWideArgs& args, int at) {
    return (start_of(args, at) + at * (args.queries - 1)) / args.queries;
  }

  // The last sequence whose first tile is not behind `slot`. Lanes try 32 of them at once.
  static __device__ __forceinline__ int find(const PagedWideArgs& args, int slot) {
    int from = 0, count = args.batch;
    while (count > 1) {
      const int step = (count + 31) / 32, own = threadIdx.x % 32 * step;
      const bool before = own < count && first_slot(args, from + own) <= slot;
      const unsigned found = __ballot_sync(kFullWarp, before);
      const int skipped = found == 0 ? 0 : (31 - __clz(static_cast<int>(found))) * step;
      from += skipped;
      count = min(count - skipped, step);
    }
    return from;
  }

  __device__ __forceinline__ void set_steps(const PagedWideArgs& args) {
    keys = length_at(args, entry);
    prefix = 0;
    if (args.prefixes != nullptr) {
      const char* at = args.prefixes + static_cast<int64_t>(args.prefix_step) * entry;
      prefix = *reinterpret_cast<const int32_t*>(at);
    }
    const int end = max(end_of(args, min(query + args.queries, queries) - 1), 0);
    last = (end + kWideStep - 1) / kWideStep;
    const int low = min(max(begin_of(args, query), 0) / kWideStep, last);
    int each = args.part_keys / kWideStep;
    first = low;
    if (each == 0) {
      each = (last - low + parts - 1) / parts;
    } else {
      first -= low % each;
    }
    first += part * each;
    if (part < parts - 1) last = min(first + each, last);
    first = max(first, low);
  }
};

// A row of the block's tile: its query of the sequence, and its head among the key head's.
struct Row {
  int query, head;
  bool real;

  __device__ __forceinline__ Row(const PagedWideArgs& args, const Tiles& tile, int at) {
    const int own = at / args.group;
    head = tile.kv_head * args.group + at - own * args.group;
    query = tile.query + own;
    real = own < args.queries && query < tile.queries;
  }
};

// The rows of the queries, zeros where there are none, by the first warpgroup, which has multiplied
// those before.
__device__ __forceinline__ void load_queries(const PagedWideArgs& args, const Tiles& tile,
                                             const WideMemory& memory) {
  const int thread = threadIdx.x % 32;
  named_sync<128>(kQueries);  // all of its warps
#pragma unroll 1
  for (int at = threadIdx.x / 32; at < kWideRows; at += 128 / 32) {
    const Row row(args, tile, at);
    const char* from = args.q;
    if (row.real) {
      from += (tile.start + row.query) * args.q_strides[0] + row.head * args.q_strides[1];
    }
#pragma unroll
    for (int i = 0; i < kWideColumns / 8 / 32; ++i) {
      const int chunk = thread + 32 * i;
      const uint32_t to =
          memory.base + chunk / 8 * kBlock + at * kRowBytes + ((chunk % 8 ^ at % 8) * 16);
      async_copy_16(to, from + chunk * 16, row.real && chunk * 8 < args.columns);
    }
  }
  async_copy_commit();
  async_copy_wait<0>();
  proxy_fence();
  named_sync<128>(kQueries);
}

// One warp loads its half of all steps, boxes of 64 columns and the keys of a page, a page a lane.
__device__ __forceinline__ void load_boxes(const PagedWideArgs& args, const CUtensorMap* map,
                                           int half, const WideMemory& memory,
                                           unsigned char* pointer) {
  static_assert(kWideStep / kWideLeastBox <= 32);
  const int own = threadIdx.x % 32 * args.copy_rows;
  const int column = half % 2 * (kWideColumns / 2);
  unsigned char* const to = pointer + kWideKeys + half * kWideHalf + own * kRowBytes;
  uint64_t* const full = reinterpret_cast<uint64_t*>(pointer + kWideBarriers + half * 8);
  uint32_t count = 0;
  for (Tiles tile(args); tile.next(args);) {
    const char* table = args.table + tile.entry * args.table_row;
    for (int step = tile.first; step < tile.last; ++step, ++count) {
      const int key = step * kWideStep;
      // Copies without a key that counts are left out.
      const int keys = min(tile.keys - key, kWideStep);
      const int copies = (keys + args.copy_rows - 1) / args.copy_rows;
      const bool loads = own < keys;
      const int row = loads ? row_of(args, table, key + own) : 0;
      mbarrier_wait(memory.empty(half), count & 1 ^ 1);
      if (threadIdx.x % 32 == 0) {
        mbarrier_expect(full, copies * args.copy_rows * kRowBytes * kHalfBlocks);
      }
      __syncwarp();
#pragma unroll 1
      for (int at = 0; loads && at < kHalfBlocks; ++at) {
        box_load(to + at * kBlock, map, column + at * 64, tile.kv_head, row, full);
      }
      __syncwarp();
    }
  }
}

// One warp loads its half of all steps, row by row: TMA cannot start copies of a few keys in the
// time that they take.
__device__ __forceinline__ void load_rows(const PagedWideArgs& args, int half,
                                          const WideMemory& memory) {
  const int lane = threadIdx.x % 32;
  const int column = half % 2 * (kWideColumns / 2) + lane * 8;
  const PagedWideCache& cache = args.cache[half / 2];
  const uint32_t to = memory.half(half) + lane / 8 * kBlock;
  uint32_t count = 0;
  for (Tiles tile(args); tile.next(args);) {
    const char* table = args.table + tile.entry * args.table_row;
    const char* from = cache.data + tile.kv_head * cache.head + column * 2;
    for (int step = tile.first; step < tile.last; ++step, ++count) {
      const int key = step * kWideStep, keys = min(tile.keys - key, kWideStep);
      int rows[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int own = lane + 32 * i;
        rows[i] = own < keys ? row_of(args, table, key + own) : 0;
      }
      mbarrier_wait(memory.empty(half), count & 1 ^ 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll 8
        for (int at = 0; at < 32; ++at) {
          const int row = 32 * i + at, place = __shfl_sync(kFullWarp, rows[i], at);
          const bool real = row < keys && column < args.columns;
          async_copy_16(to + row * kRowBytes + ((lane % 8 ^ at % 8) * 16),
                        real ? from + place * cache.row : cache.data, real);
        }
      }
      async_copy_commit();
      async_copy_wait<0>();
      proxy_fence();
      release(memory.full(half));
    }
  }
}

// Copies the first `bytes` of 16, which are 0, 8 or 16; zeros follow.
__device__ __forceinline__ void async_copy_part(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

// Converts 16 e4m3 at `second` to 16 bits each: 8 at `first`, 8 in their own place. Exact.
template <typename Format>
__device__ __forceinline__ void widen_chunk(uint32_t first, uint32_t second) {
  uint32_t narrow[4], wide[8];
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(narrow[0]), "=r"(narrow[1]), "=r"(narrow[2]), "=r"(narrow[3])
               : "r"(second)
               : "memory");
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 values = e4m3x2_to_float2(narrow[i / 2] >> (i % 2 * 16));
    const float pair[2] = {values.x, values.y};
    wide[i] = Format::pack(pair);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(i == 0 ? first : second),
                 "r"(wide[4 * i]), "r"(wide[4 * i + 1]), "r"(wide[4 * i + 2]), "r"(wide[4 * i + 3])
                 : "memory");
  }
}

// One warp loads its half of all steps of a float8 cache. A lane has 16 columns of every other row:
// it copies them to where the second half of their 32 bytes will be, and converts them there. Eight
// lanes have 64 columns of two rows, whose chunks do not share banks.
template <typename Format>
__device__ __forceinline__ void load_float8(const PagedWideArgs& args, int half,
                                            const WideMemory& memory) {
  const int lane = threadIdx.x % 32, odd = lane / 4 % 2, chunk = 2 * (lane % 4);
  const int column = half % 2 * (kWideColumns / 2) + lane / 8 * 64 + lane % 4 * 16;
  const int bytes = min(max(args.columns - column, 0), 16);
  const PagedWideCache& cache = args.cache[half / 2];
  const uint32_t to = memory.half(half) + lane / 8 * kBlock + odd * kRowBytes;
  uint32_t count = 0;
  for (Tiles tile(args); tile.next(args);) {
    const char* table = args.table + tile.entry * args.table_row;
    const char* from = cache.data + tile.kv_head * cache.head + column;
    for (int step = tile.first; step < tile.last; ++step, ++count) {
      const int key = step * kWideStep, keys = min(tile.keys - key, kWideStep);
      int rows[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int own = lane + 32 * i;
        rows[i] = own < keys ? row_of(args, table, key + own) : 0;
      }
      mbarrier_wait(memory.empty(half), count & 1 ^ 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll 4
        for (int at = 0; at < 32; at += 2) {
          const int place = __shfl_sync(kFullWarp, rows[i], at + odd), row = 32 * i + at + odd;
          const int real = row < keys ? bytes : 0;
          async_copy_part(to + (row - odd) * kRowBytes + ((chunk + 1 ^ row % 8) * 16),
                          real > 0 ? from + place * cache.row : cache.data, real);
        }
      }
      async_copy_commit();
      async_copy_wait<0>();
#pragma unroll 4
      for (int at = 0; at < kWideStep; at += 2) {
        const uint32_t row = to + at * kRowBytes;
        widen_chunk<Format>(row + ((chunk ^ (at + odd) % 8) * 16),
                            row + ((chunk + 1 ^ (at + odd) % 8) * 16));
      }
      proxy_fence();
      release(memory.full(half));
    }
  }
}

// The factor of a head's stored keys or values.
__device__ __forceinline__ float stored_factor(const float* factors, int step, int head) {
  return factors == nullptr ? 1.0f : factors[step * head];
}

// Zeros in rows of the result that no sequence has, by the threads of one warpgroup.
__device__ __forceinline__ void clear_rows(const PagedWideArgs& args) {
  const int before = start_of(args, 0), end = max(start_of(args, args.batch), before);
  const int rows = before + args.total - end, vectors = args.columns / 8;
  for (int at = blockIdx.x; at < rows; at += gridDim.x) {
    const int row = at < before ? at : end + at - before;
    for (int i = threadIdx.x % 128; i < args.heads * vectors; i += 128) {
      const int head = i / vectors;
      const uint32_t zeros[4] = {};
      store_vector(args.result + row * args.result_strides[0] + head * args.result_strides[1] +
                       (i - head * vectors) * 16,
                   zeros);
    }
    if (args.lse == nullptr || args.split) continue;
    for (int head = threadIdx.x % 128; head < args.heads; head += 128) {
      args.lse[static_cast<int64_t>(head) * args.total + row] = -INFINITY;
    }
  }
}

// Zeros in the values behind the sequence's end, which may be NaN in memory: their probabilities
// are 0. By the threads of one warpgroup, in its half.
__device__ __forceinline__ void clear_values_behind(uint32_t values, int first, int barrier) {
  constexpr int kChunks = kHalfBlocks * 8;  // of 16 bytes, of a row
  for (int at = threadIdx.x % 128; at < (kWideStep - first) * kChunks; at += 128) {
    const int row = first + at / kChunks, chunk = at % kChunks;
    const uint32_t to = values + chunk / 8 * kBlock + row * kRowBytes + chunk % 8 * 16;
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
  }
  proxy_fence();
  named_sync<128>(barrier);
}

// Scores of a step. Each half of the keys is free as soon as it is multiplied.
template <bool kBFloat16>
__device__ __forceinline__ void multiply_keys(float (&s)[32], const WideMemory& memory,
                                              uint32_t parity) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    mbarrier_wait(memory.full(half), parity);
    if (half == 0) wgmma_settle(s);
    wgmma_fence();
#pragma unroll
    for (int at = 0; at < kHalfBlocks; ++at) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t offset = at * kBlock + k * 32;
        wgmma_64<kBFloat16>(s, rows_descriptor(memory.base + half * kWideHalf + offset),
                            rows_descriptor(memory.half(half) + offset), half + at + k > 0);
      }
    }
    wgmma_commit();
  }
  wgmma_wait<1>();
  release(memory.empty(0));
  wgmma_wait<0>();
  wgmma_settle(s);
  release(memory.empty(1));
}

// s = tanh(s * slope).
__device__ __forceinline__ void cap_scores(float (&s)[32], float slope) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    float part;
    asm("rcp.approx.ftz.f32 %0, %1;"
        : "=f"(part)
        : "f"(exp2_approx(s[i] * (slope * 2.0f * kLog2E)) + 1.0f));
    s[i] = 1.0f - 2.0f * part;
  }
}

// Scores of keys that a row does not see become minus infinity; limits are relative to the thread's
// first key.
__device__ __forceinline__ void hide_scores(float (&s)[32], const int (&begin)[2],
                                            const int (&end)[2]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 8 * j + i % 2;
      if (key >= end[i / 2] || key < begin[i / 2]) s[4 * j + i] = -INFINITY;
    }
  }
}

// Scores of keys that a row does not see in its tree become minus infinity. Few steps have any, so
// no registers hold the words.
__device__ __forceinline__ void hide_by_tree(const PagedWideArgs& args, const Tiles& tile, int key,
                                             float (&s)[32]) {
  const Place place;
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const Row row(args, tile, place.row + 8 * second);
    uint64_t word = 0;
    if (row.real) {
      word = *reinterpret_cast<const uint64_t*>(args.tree + static_cast<int64_t>(args.tree_step) *
                                                                (tile.start + row.query));
    }
    const TreeRow of = tree_row(word, tile.queries, tile.old(), args.left);
    const uint64_t seen = tree_keys(of, tile.old(), key + place.column);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if ((seen >> (8 * j + i) & 1) == 0) s[4 * j + 2 * second + i] = -INFINITY;
      }
    }
  }
}

// Masks a step's scores, unless all rows see all of its keys.
__device__ __forceinline__ void mask_step(const PagedWideArgs& args, const Tiles& tile, int key,
                                          float (&s)[32]) {
  if (args.tree != nullptr) {
    // The window of a row that sees all 64 new tokens begins last.
    if (key + kWideStep > tile.old() || key < tile.old() + 63 - args.left) {
      hide_by_tree(args, tile, key, s);
    }
    return;
  }
  if (key + kWideStep <= tile.end_of(args, tile.query) &&
      key >= tile.begin_of(args, tile.query + args.queries - 1)) {
    return;
  }
  const Place place;
  int begin[2], end[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int query = tile.query + (place.row + 8 * i) / args.group;
    begin[i] = tile.begin_of(args, query) - key - place.column;
    end[i] = tile.end_of(args, query) - key - place.column;
  }
  hide_scores(s, begin, end);
}

// Adds a head's sink to a row's sum. Returns the factor of the row's sum of weighted values, 0 for
// a row that sees no key.
__device__ __forceinline__ float close_row(const PagedWideArgs& args, int head, RowState& state) {
  float shrink = 1.0f;
  if (args.sinks != nullptr) {
    constexpr float kMost = 3.40282347e38f;  // a larger one would give NaN
    const float sink = fminf(args.sinks[head] * kLog2E, kMost);
    const float above = fmaxf(state.largest, sink);
    if (above != -INFINITY) {
      shrink = exp2_approx(state.largest - above);
      state.sum = state.sum * shrink + exp2_approx(sink - above);
      state.largest = above;
    }
  }
  return state.sum == 0.0f ? 0.0f : shrink / state.sum;
}

// Columns of the block's rows from `first` on, times `factors`.
template <typename Format, int kCount>
__device__ __forceinline__ void store_columns(const PagedWideArgs& args, const Tiles& tile,
                                              int first, const float (&o)[kCount], float2 factors) {
  if (args.split && !tile.any()) return;  // paged_combine reads no values of such a part
  const Place place;
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const Row row(args, tile, place.row + 8 * second);
    if (!row.real) continue;
    const float factor = second ? factors.y : factors.x;
    const int column = first + place.column;
    char* to = args.out + (tile.start + row.query) * args.out_strides[0] +
               (static_cast<int64_t>(tile.part) * args.heads + row.head) * args.out_strides[1] +
               column * 2;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const float pair[2] = {o[4 * j + 2 * second] * factor, o[4 * j + 2 * second + 1] * factor};
      if (column + 8 * j < args.columns) {
        *reinterpret_cast<uint32_t*>(to + 16 * j) = Format::pack(pair);
      }
    }
  }
}

__device__ __forceinline__ void scale_pieces(float (&o)[kPieces][64], float2 factors) {
  if (__all_sync(kFullWarp, factors.x == 1.0f && factors.y == 1.0f)) return;
#pragma unroll
  for (auto& piece : o) {
#pragma unroll
    for (int i = 0; i < 64; ++i) piece[i] *= i / 2 % 2 ? factors.y : factors.x;
  }
}

// Returns when o += probabilities * values is done, for 64 keys.
template <bool kBFloat16>
__device__ __forceinline__ void multiply_values(float (&o)[kPieces][64], const uint32_t (&p)[4][4],
                                                uint32_t values) {
  for (auto& piece : o) wgmma_settle(piece);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kWideStep / 16; ++k) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t at = values + i * 2 * kBlock + k * 16 * kRowBytes;
      wgmma_from_registers<kBFloat16, true>(o[i], p[k], turned_descriptor(at, kBlock), true);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  for (auto& piece : o) wgmma_settle(piece);
}

// The first warpgroup: scores and probabilities.
template <typename Format, bool kBFloat16, bool kFloat8>
__device__ __forceinline__ void score_group(const PagedWideArgs& args, const WideMemory& memory,
                                            unsigned char* pointer) {
  const int thread = threadIdx.x % 128;
  uint4* const fragments = reinterpret_cast<uint4*>(pointer + kWideShares) + thread;
  float2* const factors = reinterpret_cast<float2*>(pointer + kWideFactors) + thread;
  uint32_t count = 0;
  for (Tiles tile(args); tile.next(args);) {
    if (tile.any()) load_queries(args, tile, memory);
    float scale = args.scale, slope = args.slope, of_values = 1.0f;
    if constexpr (kFloat8) {
      const float of_keys = stored_factor(args.k_scale, args.k_scale_step, tile.kv_head);
      of_values = stored_factor(args.v_scale, args.v_scale_step, tile.kv_head);
      if (slope != 0.0f) {
        slope *= of_keys;
      } else {
        scale *= of_keys;
      }
    }
    RowState upper, lower;
    for (int step = tile.first; step < tile.last; ++step, ++count) {
      float s[32] = {};
      multiply_keys<kBFloat16>(s, memory, count & 1);
      if (args.slope != 0.0f) cap_scores(s, slope);
      mask_step(args, tile, step * kWideStep, s);
      const float2 factor = {upper.add<0>(s, scale), lower.add<2>(s, scale)};
      Shares shares;
      shares.pack<Format>(s);
      named_sync<kTakers>(kTaken);
      *factors = factor;
      shares.write(fragments);
      named_arrive<kTakers>(kProbabilities);
    }
    upper.sum = lanes_reduce<4>(upper.sum, Sum());
    lower.sum = lanes_reduce<4>(lower.sum, Sum());
    float inverse[2];
    const Place place;
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      RowState& state = second ? lower : upper;
      const Row row(args, tile, place.row + 8 * second);
      inverse[second] = row.real ? close_row(args, row.head, state) * of_values : 0.0f;
      if (args.lse != nullptr && row.real && thread % 4 == 0) {
        const int64_t line = static_cast<int64_t>(tile.part) * args.heads + row.head;
        args.lse[line * args.total + tile.start + row.query] = log_of_sum(state.largest, state.sum);
      }
    }
    __syncwarp();
    named_sync<kTakers>(kTaken);
    *factors = make_float2(inverse[0], inverse[1]);
    named_arrive<kTakers>(kProbabilities);
  }
  named_sync<kTakers>(kTaken);
}

// The second and the third warpgroup, each with a half of the values' columns.
template <typename Format, bool kBFloat16>
__device__ __forceinline__ void value_group(const PagedWideArgs& args, const WideMemory& memory,
                                            const unsigned char* pointer, int half) {
  const int thread = threadIdx.x % 128;
  const uint4* const fragments = reinterpret_cast<const uint4*>(pointer + kWideShares) + thread;
  const float2* const factors = reinterpret_cast<const float2*>(pointer + kWideFactors) + thread;
  const uint32_t values = memory.half(2 + half);
  float o[kPieces][64];
  uint32_t count = 0;
  named_arrive<kTakers>(kTaken);
  for (Tiles tile(args); tile.next(args);) {
#pragma unroll
    for (auto& piece : o) {
#pragma unroll
      for (float& sum : piece) sum = 0.0f;
    }
    for (int step = tile.first; step < tile.last; ++step, ++count) {
      const int key = step * kWideStep;
      named_sync<kTakers>(kProbabilities);
      const float2 factor = *factors;
      Shares shares;
      shares.read(fragments);
      named_arrive<kTakers>(kTaken);
      scale_pieces(o, factor);
      mbarrier_wait(memory.full(2 + half), count & 1);
      if (key + kWideStep > tile.keys)
        clear_values_behind(values, tile.keys - key, kFirstTail + half);
      multiply_values<kBFloat16>(o, shares.words, values);
      release(memory.empty(2 + half));
    }
    named_sync<kTakers>(kProbabilities);
    const float2 inverse = *factors;
    named_arrive<kTakers>(kTaken);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      store_columns<Format>(args, tile, half * 256 + i * 128, o[i], inverse);
    }
    __syncwarp();
  }
}

template <typename Format, bool kBFloat16, bool kFloat8>
__global__ void __launch_bounds__(kWideThreads, 1)
    attention_paged_wide(const __grid_constant__ PagedWideArgs args,
                         const __grid_constant__ CUtensorMap k_map,
                         const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const WideMemory memory{shared_address(shared)};
  const int group = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    uint64_t* barriers = reinterpret_cast<uint64_t*>(shared + kWideBarriers);
    for (int i = 0; i < kWideHalves; ++i) {
      mbarrier_init(barriers + i, 1);
      mbarrier_init(barriers + kWideHalves + i, 4);  // warps that read a half
    }
    mbarrier_init_fence();
    if constexpr (!kFloat8) {
      map_prefetch(&k_map);
      map_prefetch(&v_map);
    }
  }
  __syncthreads();
  grid_dependency_wait();
  grid_dependency_launch();
  if (group == 3) {
    set_registers<kLoadRegisters, false>();
    const int half = threadIdx.x % 128 / 32;
    if constexpr (kFloat8) {
      load_float8<Format>(args, half, memory);
    } else if (args.copy_rows < kWideLeastBox) {
      load_rows(args, half, memory);
    } else {
      load_boxes(args, half < 2 ? &k_map : &v_map, half, memory, shared);
    }
    clear_rows(args);
  } else {
    if (group == 0) {
      set_registers<kScoreRegisters, false>();
      score_group<Format, kBFloat16, kFloat8>(args, memory, shared);
    } else {
      set_registers<kValueRegisters, true>();
      value_group<Format, kBFloat16>(args, memory, shared, group - 1);
    }
  }
}

#define TIERCEL_PAGED_WIDE(dtype, float8)                                                \
  {DType::k##dtype, float8,                                                              \
   Kernel("attention_paged_wide<" #dtype ", float8=" #float8 ">",                        \
          reinterpret_cast<const void*>(                                                 \
              attention_paged_wide<dtype, DType::k##dtype == DType::kBFloat16, float8>), \
          kWideShared)}

const PagedWideKernel kKernels[] = {
    TIERCEL_PAGED_WIDE(BFloat16, false), TIERCEL_PAGED_WIDE(Float16, false),
    TIERCEL_PAGED_WIDE(BFloat16, true), TIERCEL_PAGED_WIDE(Float16, true)};

}  // namespace

const PagedWideKernel* paged_wide_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
