// SPDX-License-Identifier: Apache-2.0
// The parameters and the tables of decode_attention's kernels.
#ifndef KERNELS_ATTENTION_DECODE_KERNELS_H_
#define KERNELS_ATTENTION_DECODE_KERNELS_H_

#include <vector_types.h>

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kDecodeMaxCluster = 8;
inline constexpr int kCombineThreads = 128;

// The most rows of a spread tile that its last block may combine; of more, decode_combine does.
inline constexpr int kDecodeMostRows = 8;

// Keys that a warp takes at once: about 4 KiB of them, and as much of values.
constexpr int decode_step(int d, int cache_bytes) {
  const int keys = 4096 / (d * cache_bytes);
  return keys < 16 ? 16 : keys;
}

// Warps of a block, bytes of its stages each: two blocks of four warps a multiprocessor where a
// cluster has a tile, one of eight where tiles are spread: fewer sequences are read at once, which
// the memory likes better. Tiles of 16 rows have two blocks of four warps in both cases.
constexpr int decode_warps(bool spread, int stage_bytes, int tiles) {
  return spread && stage_bytes <= 8192 && tiles != 2 ? 8 : 4;
}

// Steps of a warp's ring in shared memory: two with 8 warps, three with 4.
constexpr int decode_stages(int warps) { return warps == 8 ? 2 : 3; }

// Strides of a cache, in bytes. A row's address takes two products of 32 bits.
struct DecodeStrides {
  int64_t head;
  int32_t page;
  int32_t place;
};

struct DecodeArgs {
  const char* q;
  char* out;
  float* lse;  // or null
  const char* k;
  const char* v;
  // Contents are not trusted: each value is clamped to the cache and the table where it is read.
  const int32_t* page_table;
  const int32_t* lengths;
  const int32_t* prefixes;  // or null
  const float* k_scale;     // or null: 1
  const float* v_scale;
  const float* sinks;     // [heads] or null: one more score of each row
  const int32_t* starts;  // or null; sequence b has the rows of q from starts[b] to starts[b + 1]
  // Partial results of tiles that blocks share, if steps are spread; a block has two places: for
  // the tile that it begins with, and for the one that it ends with.
  float* partial;        // [2 * blocks, rows of a tile, D of the kernel]
  float2* partial_sums;  // [2 * blocks, rows of a tile]: largest score, sum
  uint64_t* arrived;     // [2 * blocks]: see parts.cuh
  // The tasks of decode_combine, or null if the last block to arrive combines: sequence, its tile,
  // first block, blocks (0: nothing). Indexed by tile or, if there are more tiles than that, by the
  // tile's second block.
  int4* tiles;
  int64_t q_strides[3];  // bytes: sequence (0 with `starts`), query, head
  int64_t out_strides[3];
  int64_t lse_strides[2];  // elements: sequence (0 with `starts`), head
  DecodeStrides k_strides;
  DecodeStrides v_strides;
  int64_t table_stride;  // bytes: from a sequence to the next
  int32_t table_step;    // from a page to the next
  int32_t length_step;
  int32_t prefix_step;
  int32_t start_step;
  int32_t last_page;  // of the cache: what an entry beyond it, or below 0, counts as
  int batch;
  int total;    // rows of q, with `starts`
  int queries;  // of a sequence; with `starts`, the most
  int heads;
  int kv_heads;
  int group;       // heads per key head
  int rows;        // queries * group
  int row_blocks;  // tiles of a key head
  int sequence_tiles;
  int columns;  // blocks that go through a sequence's keys together, each with its own tiles
  int d;
  int capacity;   // keys of a sequence that the page table has room for
  int page_bits;  // log2 of a page's keys
  int left;       // of the window; negative: no limit
  int right;
  float scale;     // the factor of raw scores: to powers of 2 or, with a cap, to shares of it
  float cap_log2;  // the cap in powers of 2, or 0
  bool k_scale_per_head;
  bool v_scale_per_head;
  bool by_tile;
  bool skips_longer;    // sequences of more than `queries`
  bool early_launch;    // see grid_dependency_wait_and_launch()
  int32_t tree_step;    // from a row's word to the next, in bytes
  const int64_t* tree;  // [rows of q] or null; bit j: the row sees new token j of its sequence
};

struct DecodeKernel {
  DType dtype;
  bool float8;
  int d;            // of the tiles
  bool any_d;       // takes smaller ones too
  int tiles;        // of 8 rows
  int residents;    // blocks per multiprocessor
  bool spread;      // blocks share all tiles evenly; otherwise a cluster has one
  int warps;        // of a block
  uint32_t shared;  // bytes of a block
  Kernel kernel;
};

struct DecodeCombineKernel {
  DType dtype;
  Kernel kernel;
};

// By dtype and cache.
const DecodeKernel* decode_kernels_bf16(int* count);
const DecodeKernel* decode_kernels_bf16_fp8(int* count);
const DecodeKernel* decode_kernels_fp16(int* count);
const DecodeKernel* decode_kernels_fp16_fp8(int* count);
const DecodeCombineKernel* decode_combine_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_DECODE_KERNELS_H_
