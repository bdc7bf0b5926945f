// SPDX-License-Identifier: Apache-2.0
// What reduce's launcher and its device code agree on: the kernels' argument and the tables of
// kernels.
#ifndef KERNELS_REDUCE_REDUCE_KERNELS_H_
#define KERNELS_REDUCE_REDUCE_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kReduceMaxCluster = 8;

// out[i][j] = op over r of x[i][r][j], with any strides of x. The blocks of part p, of `parts`,
// reduce the entries [p * part, (p + 1) * part) of r along rows, every parts-th rows of threads
// down columns. Either the parts of an output are a cluster, or their results are side by side as
// the kernel says below.
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
  int cluster;  // parts, or 1 if they are none
  float divisor;
  DType out_dtype;
  int ahead;  // so many blocks ask for their data before they may read it
};

// The shared memory and threads of a block of the kernel for rows of a few elements.
inline constexpr int kReducePackedBytes = 16 * 1024;
inline constexpr int kReducePackedThreads = 128;
// An even number, so that a block of 16-bit rows begins at a whole word, and whole turns of the
// threads where it has one: of a row a thread, or of two where words are parts of both.
constexpr int reduce_packed_rows(int row_bytes) {
  const int most = kReducePackedBytes / row_bytes;
  const int turn = row_bytes % 4 == 0 ? kReducePackedThreads : 2 * kReducePackedThreads;
  return most >= turn ? most / turn * turn : most & ~1;
}

// The longest rows of the kernels that have one for each length.
inline constexpr int kReduceTinyLength = 6;

// The columns of a strip of the kernel for shifted columns: its threads' vectors but for one.
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
  bool max;  // else a sum
  Kind kind;
  int lanes;         // rows: that share one; columns: vectors side by side in a block
  int per_thread;    // rows: of a group of lanes; columns: loads in flight
  int vector_bytes;  // columns: of a load; rows take any alignment
  unsigned block;    // at most
  Kernel kernel;
};

// Along rows: the reduced dimension is contiguous (or nothing is). Partial results: [outer * inner,
// parts].
const ReduceKernel* reduce_rows_kernels(int* count);

// Down columns: `inner` is contiguous. Partial results: [parts, outer * inner].
const ReduceKernel* reduce_columns_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_REDUCE_REDUCE_KERNELS_H_
