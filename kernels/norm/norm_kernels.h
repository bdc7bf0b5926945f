// SPDX-License-Identifier: Apache-2.0
// Shared by the norms' host and device code: launch bounds, kernel arguments, tables of kernels.
#ifndef KERNELS_NORM_NORM_KERNELS_H_
#define KERNELS_NORM_NORM_KERNELS_H_

#include <cstdint>

#include "kernels/norm/norm.h"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kNormMaxThreads = 512;     // per block
inline constexpr int kNormNarrowThreads = 256;  // backward, rows not 16-byte aligned
inline constexpr int kNormMaxCluster = 8;
inline constexpr int kNormMaxWarps = kNormMaxThreads / 32;
inline constexpr int64_t kNormMaxRows = int64_t{1} << 30;
inline constexpr int kNormPlainWarpThreads = 128;
inline constexpr int kNormLongThreads = 256;
inline constexpr int kNormMaxStages = 8;
inline constexpr int kNormReduceThreads = 512;
inline constexpr int kNormReduceAtOnce = 9;  // parts that a warp loads at once

// The owner of a row: some lanes of a warp (norm_short), a block or a cluster (norm_forward), a
// warp or a block (norm_plain), or a cluster that holds it in shared memory (norm_long).
enum class NormRowOwner { kShort, kBlock, kPlain, kLong };

// The calls that a kernel is specialised for: RMS norms without bias whose weight, if any, has x's
// type; layer norms whose parameters have x's type; or all. norm_forward's kernels take all.
enum class NormSpecialization { kRms, kLayer, kBoth };

// Launch bounds. `..._threads`: threads per block, at most. `..._resident_blocks`: blocks per
// multiprocessor that registers must leave room for.
constexpr int norm_short_threads(int vectors, int rows) { return vectors * rows == 1 ? 256 : 128; }
constexpr int norm_short_resident_blocks(int vectors, int rows, bool any) {
  if (any) return vectors > 2 ? 7 : 9;
  return rows == 1 ? 8 : 12;
}

constexpr int norm_long_resident_blocks(int vectors, bool layer_norm) {
  if (vectors > 4) return layer_norm ? 3 : 4;
  return layer_norm ? 5 : 6;
}

// 1024 threads with four vectors each, whose parameters are in registers, too.
constexpr int norm_plain_threads(int vectors, bool warp) {
  if (warp) return kNormPlainWarpThreads;
  return vectors < 4 ? kNormMaxThreads : 256;
}
constexpr int norm_plain_resident_blocks(int vectors, bool warp) {
  return 1024 / norm_plain_threads(vectors, warp);
}

// True if two blocks of norm_backward can add their sums before they write them.
constexpr bool norm_backward_can_pair(int element, bool aligned16, int vectors, int rows,
                                      NormKind kind) {
  return aligned16 && element == 2 && vectors == 4 && rows == 1 && kind == NormKind::kLayer;
}

// When a thread of norm_forward reads its part of weight and bias: late, when it needs them;
// packed, together with x if they have x's type; as floats, together with x for any type.
enum class NormParameters { kLate, kPacked, kFloats };
// Few vectors mean small inputs, where a late load of the weight adds to the latency. With more
// vectors, registers have no room for floats.
constexpr NormParameters norm_forward_parameters(bool aligned16, int vectors, bool residual) {
  if (!aligned16) return NormParameters::kLate;
  if (vectors <= 2) return NormParameters::kFloats;
  return vectors == 4 && !residual ? NormParameters::kPacked : NormParameters::kLate;
}

constexpr int norm_forward_threads(int element, bool aligned16, int vectors) {
  if (!aligned16) return vectors > 4 ? 448 : kNormMaxThreads;  // more registers for more elements
  if (element == 4 || vectors < 4) return kNormMaxThreads;
  return vectors == 4 ? 256 : 448;
}
constexpr int norm_forward_resident_blocks(DType dtype, bool aligned16, int vectors,
                                           bool residual) {
  if (!aligned16) return 1;
  const bool packed =
      norm_forward_parameters(aligned16, vectors, residual) == NormParameters::kPacked;
  const int words = vectors * 4 * (residual ? 2 : 1);
  const int element = static_cast<int>(dtype_bytes(dtype));
  const int threads = norm_forward_threads(element, aligned16, vectors);
  if (packed && dtype == DType::kFloat16) return 3;  // two registers more than bfloat16's 64
  const int registers = packed ? 64 : words <= 16 ? 48 : words <= 32 ? 64 : 128;
  return 65536 / registers / threads;
}

// norm_backward keeps x and grad in registers between its two passes, and the weight all the time,
// if there is room beside the sums. Otherwise the weight is in shared memory.
constexpr int norm_backward_sums(int element, int vectors, NormKind kind) {
  return vectors * 16 / element * (kind == NormKind::kLayer ? 2 : 1);
}
constexpr bool norm_backward_keeps_rows(int element, int vectors, int rows, NormKind kind) {
  return norm_backward_sums(element, vectors, kind) + 8 * vectors * rows <= 72;
}
constexpr bool norm_backward_keeps_weight(int element, bool aligned16, int vectors, int rows,
                                          NormKind kind) {
  return aligned16 && norm_backward_keeps_rows(element, vectors, rows, kind) &&
         norm_backward_sums(element, vectors, kind) + vectors * (8 * rows + 16 / element) < 96;
}

// 384 threads have 168 registers each.
constexpr int norm_backward_short_threads(int vectors) {
  return vectors == 2 ? kNormMaxThreads : 384;
}

// All strides and offsets are in bytes.
struct NormForwardArgs {
  const char* x;
  const char* residual;
  const char* weight;
  const char* bias;
  char* out;
  char* residual_out;
  int64_t x_stride;  // between rows
  int64_t residual_stride;
  int64_t out_stride;
  int64_t x_inner;  // between elements of a row
  int64_t residual_inner;
  int rows;
  int columns;
  int slice;            // columns per block, if a row has one block or more
  int cluster_log2;     // of the blocks per row
  int prefetch_blocks;  // that prefetch x while the previous grid still runs
  float inverse_columns;
  float eps;
  bool layer_norm;
  bool weight_float32;  // and x is not
  bool bias_float32;
  bool early_launch;  // see grid_dependency_wait_and_launch()
};

struct NormBackwardArgs {
  const char* streams[3];  // x, the result's gradient and, if any, the gradient that adds to grad_x
  int64_t strides[3];      // between rows
  int64_t inner[3];        // between elements
  const char* weight;      // or null
  char* grad_x;
  int64_t grad_x_stride;
  float* partial[2];  // [blocks, columns] sums over a block's rows for weight and bias; or null
  int rows;
  int stream_count;
  int columns;
  int slice;            // columns per block, a multiple of 16 bytes
  int threads_per_row;  // per block
  int stages;           // per team
  int weight_offset;    // in shared memory
  float inverse_columns;
  float eps;
  bool weight_float32;
  int whole_tiles;    // per block
  int rows_of_tiles;  // of one tile of all blocks
  int prefetch_rows;  // of each team, while the previous grid still runs
  int last_share;     // a block's rows in the last tile, in units of the rows per warp; or 0
  bool paired;        // a cluster is two blocks with rows of their own, which add their sums
};

struct NormReduceArgs {
  const float* partial[2];  // weight's, bias's
  char* out[2];
  int parts;
  int columns;
  int part_warps;  // that share columns: a power of two, at least a lane's columns
  bool float32[2];
  bool whole_lines;  // each 32 columns of `partial` are exactly one line of the L2
};

struct NormForwardKernel {
  DType dtype;
  bool aligned16;
  bool residual;
  NormSpecialization specialization;
  NormRowOwner owner;
  int lanes;    // per short row
  int vectors;  // per thread and row
  int rows;     // per thread
  Kernel kernel;
};

struct NormBackwardKernel {
  DType dtype;
  bool aligned16;  // rows begin and end on 16 bytes, so TMA can copy them
  NormKind kind;
  int vectors;    // per thread and row
  int rows;       // per thread at once
  bool is_short;  // norm_backward_short, one warp per row
  Kernel kernel;
};

struct NormReduceKernel {
  DType dtype;
  int columns;  // per lane
  Kernel kernel;
};

const NormForwardKernel* norm_forward_kernels(int* count);
const NormBackwardKernel* norm_backward_kernels(int* count);
const NormReduceKernel* norm_reduce_kernels(int* count);

// Hopper's limit per block, less the kernels' static shared memory.
inline constexpr int kNormMaxDynamicSmem = 232448 - 10240;

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_KERNELS_H_
