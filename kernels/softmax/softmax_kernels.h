// SPDX-License-Identifier: Apache-2.0
// What the softmax launcher and its device code agree on: the kernels' arguments and tables.
#ifndef KERNELS_SOFTMAX_SOFTMAX_KERNELS_H_
#define KERNELS_SOFTMAX_SOFTMAX_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// Rows at one distance; elements of a row are neighbours.
struct SoftmaxRows {
  char* data;
  char* end;           // behind the last element
  int64_t row_stride;  // bytes
};

enum class SoftmaxMask : int {
  kNone = 0,
  kKeep,        // bool: false makes the score -inf
  kAdd,         // of the scores' dtype, added after scaling
  kAddFloat32,  // the same in float32
};

// A mask broadcast over some of the leading dimensions. Row r's is at r's place in the dimensions
// (any, sizes[0], sizes[1]), from the outermost.
struct SoftmaxMaskRows {
  const char* data;
  int64_t strides[3];  // bytes
  uint32_t sizes[2];
  int64_t step;  // bytes between a row's elements
  SoftmaxMask kind;
  bool vectors;  // a vector's part of it is one aligned piece
};

struct SoftmaxArgs {
  SoftmaxRows grad;  // backward: of the result
  SoftmaxRows x;     // the scores; backward: the result
  SoftmaxRows out;   // the result; backward: the scores' gradient
  SoftmaxMaskRows mask;
  int64_t rows;
  int columns;
  float scale;      // not 0
  float pad;        // the infinity that the scale makes -inf
  uint32_t blocks;  // a row, where it has whole ones
  int ahead;        // so many blocks bring aligned rows to the L2 before they may read
  bool log;         // log_softmax
  bool vectors;     // all matrices' rows start at the same distance from a multiple of 16 bytes
};

// A kernel; it takes rows of up to lanes or threads * vectors vectors of 16 bytes.
struct SoftmaxKernel {
  DType dtype;
  bool masked;
  bool aligned;  // only where all rows are whole vectors, and a mask is of kKeep and `vectors`
  int lanes;     // of a warp that share a row; 0: whole blocks do
  int vectors;   // a thread holds; 0: it goes through the row twice, however long that is
  int threads;   // at most, a block
  int blocks;    // at most, that share a row
  Kernel kernel;
};

inline constexpr int kSoftmaxVectorBytes = 16;
inline constexpr int kSoftmaxLineBytes = 128;
// At most, a block: two of them on a multiprocessor, or three of the others, with 64 registers a
// thread.
inline constexpr int kSoftmaxThreads = 512;
inline constexpr int kSoftmaxWideThreads = 320;
inline constexpr int kSoftmaxLaneThreads = 256;  // where lanes share a row
inline constexpr int kSoftmaxBlocks = 8;       // at most, a row elsewhere: what every GPU can place
inline constexpr int kSoftmaxWideBlocks = 16;  // where threads hold 8 aligned vectors, forward
inline constexpr int kSoftmaxWarps = 128;      // at most, a row

const SoftmaxKernel* softmax_forward_kernels(int* count);
const SoftmaxKernel* softmax_backward_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_SOFTMAX_KERNELS_H_
