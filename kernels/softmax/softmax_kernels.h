// SPDX-License-Identifier: Apache-2.0
// The interface of softmax's host and device code: the kernels' arguments and tables.
#ifndef KERNELS_SOFTMAX_SOFTMAX_KERNELS_H_
#define KERNELS_SOFTMAX_SOFTMAX_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// Contiguous rows, a constant stride apart.
struct SoftmaxRows {
  char* data;
  char* end;           // behind the last element
  int64_t row_stride;  // bytes
};

enum class SoftmaxMask : int {
  kNone = 0,
  kKeep,        // bool: false makes the score -inf
  kAdd,         // of the scores' dtype, added after scaling
  kAddFloat32,  // float32, added after scaling
};

// A mask broadcast over some of the leading dimensions. The mask of row r is at r's index in
// dimensions (any, sizes[0], sizes[1]), outermost first.
struct SoftmaxMaskRows {
  const char* data;
  int64_t strides[3];  // bytes
  uint32_t sizes[2];
  int64_t step;  // bytes between a row's elements
  SoftmaxMask kind;
  bool vectors;  // the mask of each vector is one aligned piece
};

struct SoftmaxArgs {
  SoftmaxRows grad;  // backward: gradient of the result
  SoftmaxRows x;     // the scores; backward: the result
  SoftmaxRows out;   // the result; backward: the scores' gradient
  SoftmaxMaskRows mask;
  int64_t rows;
  int columns;
  float scale;          // not 0
  float pad;            // the infinity whose product with the scale is -inf
  uint32_t blocks;      // per row, if whole blocks share it
  int prefetch_blocks;  // blocks that prefetch their data to L2 before they may read it
  bool log;             // log_softmax
  bool vectors;         // the rows of all matrices have the same offset from a multiple of 16 bytes
};

// A kernel for rows of up to lanes or threads * vectors vectors of 16 bytes.
struct SoftmaxKernel {
  DType dtype;
  bool masked;
  bool aligned;  // only for rows of whole vectors, with a mask only if it is kKeep and `vectors`
  int lanes;     // per row, within a warp; 0: whole blocks
  int vectors;   // per thread; 0: reads the row twice, for any length
  int threads;   // at most, per block
  int blocks;    // at most, per row
  Kernel kernel;
};

inline constexpr int kSoftmaxVectorBytes = 16;
inline constexpr int kSoftmaxLineBytes = 128;
// The most threads per block: two of these blocks per multiprocessor, or three of the others, with
// 64 registers per thread.
inline constexpr int kSoftmaxThreads = 512;
inline constexpr int kSoftmaxWideThreads = 320;
inline constexpr int kSoftmaxLaneThreads = 256;  // if lanes share a row
inline constexpr int kSoftmaxBlocks = 8;         // at most, per row, otherwise: the portable limit
inline constexpr int kSoftmaxWideBlocks = 16;    // forward with 8 aligned vectors per thread
inline constexpr int kSoftmaxWarps = 128;        // at most, per row

const SoftmaxKernel* softmax_forward_kernels(int* count);
const SoftmaxKernel* softmax_backward_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_SOFTMAX_KERNELS_H_
