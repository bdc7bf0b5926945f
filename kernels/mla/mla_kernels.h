// SPDX-License-Identifier: Apache-2.0
// The interface of the family's host and device code: the kernels' arguments and tables.
#ifndef KERNELS_MLA_MLA_KERNELS_H_
#define KERNELS_MLA_MLA_KERNELS_H_

#include <vector_types.h>

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kMlaLatent = 512;  // columns of a latent, which are its value too
inline constexpr int kMlaRotary = 64;   // columns of the key alone, behind them
inline constexpr int kMlaKey = kMlaLatent + kMlaRotary;

inline constexpr int kMlaRows = 64;  // of a block: queries times heads
inline constexpr int kMlaStep = 64;  // keys
inline constexpr int kMlaStages = 2;
inline constexpr int kMlaThreads = 384;      // two warpgroups that multiply, one that loads
inline constexpr int kMlaCombineGroups = 4;  // of a block of mla_combine, 128 threads each
inline constexpr int kMlaCombineParts = 6;   // that a group reads at once
// Its blocks go through rows: most end at once, where no lanes share sequences, and launching one
// for each row would take longer than all the rest.
inline constexpr int kMlaCombineBlocks = 2 * 132;
// Steps of a part of a sequence in the batch-invariant mode.
inline constexpr int kMlaInvariantPart = 16;
inline constexpr int kMlaLeastBox = 8;  // keys of a copy by TMA; pages of fewer are copied by row

// Shared memory of a block, in bytes: queries, steps of keys, probabilities, factors of rows,
// barriers, where keys are in the cache. A block of 64 columns lies behind the other, each as TMA's
// 128-byte swizzle has it.
inline constexpr int kMlaColumns = 128;  // bytes of a row of 64 columns
inline constexpr int kMlaBlock = kMlaStep * kMlaColumns;
inline constexpr int kMlaBlocks = kMlaKey / 64;
inline constexpr int kMlaTile = kMlaBlocks * kMlaBlock;
inline constexpr int kMlaShares = (1 + kMlaStages) * kMlaTile;
inline constexpr int kMlaFactors = kMlaShares + kMlaRows * kMlaStep * 2;
inline constexpr int kMlaBarriers = kMlaFactors + 128 * 8;
inline constexpr int kMlaKeyRows = kMlaBarriers + 4 * kMlaStages * 8;
inline constexpr uint32_t kMlaShared = kMlaKeyRows + kMlaStages * kMlaStep * 8;
static_assert(kMlaShared <= 227 << 10);

// mla_decode_ahead's: three steps of keys, the last 80 columns of the queries; of each step factors
// of rows and a note; barriers; what is loaded next.
inline constexpr int kAheadStages = 3;
inline constexpr int kAheadParts = 3;  // of a step, in the order in which they are multiplied
inline constexpr int kAheadRotary = kAheadStages * kMlaTile;
inline constexpr int kAheadLatent = kAheadRotary + kMlaBlock;
inline constexpr int kAheadFactors = kAheadLatent + kMlaRows * 16 * 2;
inline constexpr int kAheadNotes = kAheadFactors + kAheadStages * kMlaRows * 4;
inline constexpr int kAheadBarriers = kAheadNotes + kAheadStages * 16;
inline constexpr int kAheadCursor = kAheadBarriers + kAheadStages * (kAheadParts + 4) * 8;
inline constexpr uint32_t kAheadShared = kAheadCursor + 32;
static_assert(kAheadShared <= 227 << 10);

// mla_sparse's: instead of mla_decode's factors, factors and largest scores of a step's rows;
// behind the rest, two parts of the rows' sums, and which keys of a stage count.
inline constexpr int kSparseExchange = kMlaFactors;
inline constexpr int kSparseSums = kMlaShared;
inline constexpr int kSparseValid = kSparseSums + 2 * kMlaRows * 4;
inline constexpr uint32_t kSparseShared = kSparseValid + kMlaStages * 8;
static_assert(kSparseExchange + kMlaRows * 8 <= kMlaBarriers && kSparseShared <= 227 << 10);

// A lane of `row_blocks` blocks goes through an equal share of all sequences' steps; each of its
// blocks has 64 rows.
struct MlaDecodeArgs {
  const char* q;
  char* out;
  float* lse;  // [B, H, Sq], or null
  // Contents are not trusted: each value is clamped to the cache and the table where it is read.
  const int32_t* page_table;
  const int32_t* lengths;
  const char* cache;      // float8
  const float* kv_scale;  // of it, or null: 1
  int64_t page_stride;    // bytes, of it
  int64_t place_stride;
  // Lanes leave here their rows of 512 floats of sequences that they share. A lane has two places,
  // for the sequence that it begins with, and for the one that it ends with; one with `part_steps`.
  float* partial;        // [2 * lanes, row_blocks, part_rows, 512]
  float2* partial_sums;  // [2 * lanes, row_blocks, part_rows]: largest score, sum
  int4* shared;          // sequence, its first lane, lanes (0: nothing): see list_shared
  int64_t q_strides[3];  // bytes: sequence, query, head
  int64_t out_strides[3];
  int64_t table_stride;  // bytes: from a sequence to the next
  int32_t table_step;    // from a page to the next
  int32_t length_step;
  int32_t last_page;  // of the cache: what an entry beyond it, or below 0, counts as
  int batch;
  int queries;
  int heads;
  int rows;  // queries * heads
  int row_blocks;
  int part_rows;  // of 64, those that there are
  int lanes;
  int part_steps;    // 0, or lanes have a part of one sequence each, of that many steps
  int capacity;      // keys of a sequence that the page table has room for
  int page_bits;     // log2 of a page's keys
  int page_rows;     // from a page to the next, in rows of the tensor map
  int copy_rows;     // keys of a copy
  int row_groups;    // of mla_combine's threads: how many share a row
  bool pair;         // blocks of a lane are clusters of two, which load keys for each other
  bool by_sequence;  // entries of `shared`; by lane otherwise
  bool ahead;        // scores are made a step ahead
  float scale;       // of raw scores, to powers of 2
};

// Rows of a cache: of the queries' dtype, float8, or 656 bytes of which 512 are float8.
enum class MlaLayout { kSame, kFloat8, kPacked };

struct MlaCombineKernel {
  DType dtype;
  bool many;  // for sequences of more parts than kMlaCombineParts for each group
  Kernel kernel;
};

struct MlaDecodeKernel {
  DType dtype;
  MlaLayout layout;
  Kernel kernel;
};

inline constexpr int kMlaPacked = 656;  // bytes: float8 latents, 4 float32 scales, 16-bit rotary
inline constexpr int kMlaGroup = 128;   // latents of a scale

const MlaDecodeKernel* mla_decode_kernels(int* count);
const MlaDecodeKernel* mla_ahead_kernels(int* count);
const MlaDecodeKernel* mla_sparse_kernels(int* count);
const MlaCombineKernel* mla_combine_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_MLA_MLA_KERNELS_H_
