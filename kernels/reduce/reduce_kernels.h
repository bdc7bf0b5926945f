// SPDX-License-Identifier: Apache-2.0
// The interface of reduce's host and device code: the kernels' argument and the tables of kernels.
#ifndef KERNELS_REDUCE_REDUCE_KERNELS_H_
#define KERNELS_REDUCE_REDUCE_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kReduceMaxCluster = 8;

// out[i][j] = op over r of x[i][r][j], with any strides of x. Part p of `parts` covers entries
// [p * part, (p + 1) * part) of r in kernels along rows; down columns, parts alternate in steps of
// a block's rows of threads. The blocks of an output's parts form a cluster, or they write partial
// results in the layout given below.
struct ReduceArgs {
  const char* x;
  const char* end;  // behind x's last element
  void* out;
  int64_t outer;          // i
  int64_t inner;          // j
  int64_t length;         // r
  int64_t outer_stride;   // bytes
  int64_t inner_stride;   // bytes
  int64_t length_stride;  // bytes
  int64_t part;
  int parts;
  int cluster;  // `parts` if they form a cluster, else 1
  float divisor;
  DType out_dtype;
  int prefetch_blocks;  // blocks that prefetch their data to L2 before they may read it
};

// Shared memory and threads per block of the kernel for rows of a few elements.
inline constexpr int kReducePackedBytes = 16 * 1024;
inline constexpr int kReducePackedThreads = 128;
// Rows per block: an even number, so that blocks of 16-bit rows begin at a whole word, and if
// possible a multiple of the rows that all threads process at once: one each, or two if they share
// words.
constexpr int reduce_packed_rows(int row_bytes) {
  const int most = kReducePackedBytes / row_bytes;
  const int turn = row_bytes % 4 == 0 ? kReducePackedThreads : 2 * kReducePackedThreads;
  return most >= turn ? most / turn * turn : most & ~1;
}

// The longest rows for which each length has its own kernel.
inline constexpr int kReduceTinyLength = 6;

// Columns per strip of the kernel for shifted columns: one vector less than its threads read.
constexpr int reduce_shifted_width(int lanes, int element) { return (lanes - 1) * (16 / element); }

struct ReduceKernel {
  enum class Kind {
    rows,
    rows_aligned,
    rows_turned,
    rows_packed,
    rows_tiny,
    columns,
    columns_shifted,
  };

  DType dtype;
  bool max;  // else sum
  Kind kind;
  int lanes;         // rows: lanes per row; columns: adjacent vectors per block
  int per_thread;    // rows: rows per group of lanes; columns: loads in flight
  int vector_bytes;  // columns: bytes per load; rows take any alignment
  unsigned block;    // at most
  Kernel kernel;
};

// Along rows: the reduced dimension is contiguous, or none is. Partial results: [outer * inner,
// parts].
const ReduceKernel* reduce_rows_kernels(int* count);

// Down columns: `inner` is contiguous. Partial results: [parts, outer * inner].
const ReduceKernel* reduce_columns_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_REDUCE_REDUCE_KERNELS_H_
