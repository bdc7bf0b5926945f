// SPDX-License-Identifier: Apache-2.0
// What the norms' launchers and their device code agree on: the kernels' arguments and tables.
#ifndef KERNELS_NORM_NORM_KERNELS_H_
#define KERNELS_NORM_NORM_KERNELS_H_

#include <cstdint>

#include "kernels/norm/norm.h"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kNormMaxThreads = 512;     // a block
inline constexpr int kNormNarrowThreads = 256;  // the same where rows are not on 16 bytes, backward
inline constexpr int kNormMaxCluster = 8;
inline constexpr int kNormMaxWarps = kNormMaxThreads / 32;
inline constexpr int64_t kNormMaxRows = int64_t{1} << 30;
inline constexpr int kNormPlainWarpThreads = 128;
inline constexpr int kNormLongThreads = 256;
inline constexpr int kNormMaxStages = 8;
inline constexpr int kNormReduceThreads = 512;
inline constexpr int kNormReduceAtOnce = 9;  // parts that a warp reads at once

// Who has a row: some lanes of a warp (norm_short), a block or a cluster (norm_forward), a warp or
// a block (norm_plain), or a cluster that holds it in shared memory (norm_long).
enum class NormShape { kShort, kBlock, kPlain, kLong };

// What a kernel, but norm_forward's, is made for: an RMS norm without bias and with a weight of
// x's type or none, a layer norm with parameters of x's type, or all.
enum class NormKinds { kRms, kLayer, kBoth };

// Threads of a block of norm_short, and how many such blocks registers must leave room for.
constexpr int norm_short_threads(int vectors, int rows) { return vectors * rows == 1 ? 256 : 128; }
constexpr int norm_short_blocks(int vectors, int rows, bool any) {
  if (any) return vectors > 2 ? 7 : 9;
  return rows == 1 ? 8 : 12;
}

// The same of norm_long.
constexpr int norm_long_blocks(int vectors, bool layer_norm) {
  if (vectors > 4) return layer_norm ? 3 : 4;
  return layer_norm ? 5 : 6;
}

// The most threads of a block of norm_plain, and how many such blocks registers must leave room
// for: 1024 threads of four vectors, whose parameters wait in registers too.
constexpr int norm_plain_threads(int vectors, bool warp) {
  if (warp) return kNormPlainWarpThreads;
  return vectors < 4 ? kNormMaxThreads : 256;
}
constexpr int norm_plain_blocks(int vectors, bool warp) {
  return 1024 / norm_plain_threads(vectors, warp);
}

// Whether two blocks of norm_backward can add their sums up before they leave them.
constexpr bool norm_backward_pairs(int element, bool wide, int vectors, int rows, NormKind kind) {
  return wide && element == 2 && vectors == 4 && rows == 1 && kind == NormKind::kLayer;
}

// When a thread of norm_forward reads its part of weight and bias: when it needs it; with x, where
// they have x's type; or with x whatever their type.
enum class NormParameters { kLate, kPacked, kFloats };
// Few vectors mean small inputs: then a weight that is asked for late costs time of its own. Of
// more, registers do not hold floats.
constexpr NormParameters norm_forward_parameters(bool wide, int vectors, bool residual) {
  if (!wide) return NormParameters::kLate;
  if (vectors <= 2) return NormParameters::kFloats;
  return vectors == 4 && !residual ? NormParameters::kPacked : NormParameters::kLate;
}

// The most threads of a block of norm_forward, and how many such blocks registers must leave room
// for on a multiprocessor.
constexpr int norm_forward_threads(int element, bool wide, int vectors) {
  if (!wide) return vectors > 4 ? 448 : kNormMaxThreads;  // more registers for more elements
  if (element == 4 || vectors < 4) return kNormMaxThreads;
  return vectors == 4 ? 256 : 448;
}
constexpr int norm_forward_blocks(DType dtype, bool wide, int vectors, bool residual) {
  if (!wide) return 1;
  const bool packed = norm_forward_parameters(wide, vectors, residual) == NormParameters::kPacked;
  const int words = vectors * 4 * (residual ? 2 : 1);
  const int element = static_cast<int>(dtype_bytes(dtype));
  const int threads = norm_forward_threads(element, wide, vectors);
  if (packed && dtype == DType::kFloat16) return 3;  // two registers more than bfloat16's 64
  const int registers = packed ? 64 : words <= 16 ? 48 : words <= 32 ? 64 : 128;
  return 65536 / registers / threads;
}

// Whether norm_backward holds x and grad in registers between its two passes, and the weight all
// the time: beside the sums there is not always room. A weight that it does not keep is in shared
// memory.
constexpr int norm_backward_sums(int element, int vectors, NormKind kind) {
  return vectors * 16 / element * (kind == NormKind::kLayer ? 2 : 1);
}
constexpr bool norm_backward_holds(int element, int vectors, int rows, NormKind kind) {
  return norm_backward_sums(element, vectors, kind) + 8 * vectors * rows <= 72;
}
constexpr bool norm_backward_keeps(int element, bool wide, int vectors, int rows, NormKind kind) {
  return wide && norm_backward_holds(element, vectors, rows, kind) &&
         norm_backward_sums(element, vectors, kind) + vectors * (8 * rows + 16 / element) < 96;
}

// The most threads of a block of norm_backward_short: 384 have 168 registers each.
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
  int slice;         // columns a block, where a row has one or more
  int cluster_log2;  // of how many it has
  int ahead;         // so many blocks ask for x before they may read it
  float inverse_columns;
  float eps;
  bool layer_norm;
  bool weight_float32;  // and x is not
  bool bias_float32;
};

struct NormBackwardArgs {
  const char* streams[3];  // x, the result's gradient and, if any, what else adds to grad_x
  int64_t strides[3];      // between rows
  int64_t inner[3];        // between elements
  const char* weight;      // or null
  char* grad_x;
  int64_t grad_x_stride;
  float* partial[2];  // [blocks, columns] sums over a block's rows for weight and bias; or null
  int rows;
  int stream_count;
  int columns;
  int slice;            // columns a block, a multiple of 16 bytes
  int threads_per_row;  // of a block
  int stages;           // a team's
  int weight_offset;    // in shared memory
  float inverse_columns;
  float eps;
  bool weight_float32;
  int whole_tiles;    // that each block has
  int rows_of_tiles;  // of a tile of each block
  int ahead;          // rows that a team asks for before it may read them
  int last_share;     // what a block has in a last tile, in rows that a warp has at once; or 0
  bool paired;        // clusters are of two blocks with rows of their own, which add their sums up
};

struct NormReduceArgs {
  const float* partial[2];  // weight's, bias's
  char* out[2];
  int parts;
  int columns;
  int part_warps;  // that have the same columns: a power of two, and not less than a lane's columns
  bool float32[2];
  bool whole_lines;  // each 32 columns of `partial` are a line of the L2, with nothing else in it
};

struct NormForwardKernel {
  DType dtype;
  bool wide;
  bool residual;
  NormKinds kinds;
  NormShape shape;
  int lanes;    // that a short row has
  int vectors;  // a thread, of a row
  int rows;     // a thread
  Kernel kernel;
};

struct NormBackwardKernel {
  DType dtype;
  bool wide;  // rows begin and end on 16 bytes: the copy engine can fetch them
  NormKind kind;
  int vectors;    // a thread, of a row
  int rows;       // a thread, at once
  bool is_short;  // norm_backward_short, of rows that have a warp each
  Kernel kernel;
};

struct NormReduceKernel {
  DType dtype;
  int columns;  // a lane
  Kernel kernel;
};

const NormForwardKernel* norm_forward_kernels(int* count);
const NormBackwardKernel* norm_backward_kernels(int* count);
const NormReduceKernel* norm_reduce_kernels(int* count);

// What a block may have on Hopper, less the kernels' own static share.
inline constexpr int kNormMaxDynamicSmem = 232448 - 10240;

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_KERNELS_H_
