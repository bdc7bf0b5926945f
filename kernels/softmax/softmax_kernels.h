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
  int64_t row_stride;  // bytes
};

enum class SoftmaxMask : int {
  kNone = 0,
  kKeep,        // bool: false makes the score -inf
  kAdd,         // of the scores' dtype, added after scaling
  kAddFloat32,  // the same in float32
};

// A mask broadcast over some of the leading dimensions: row -> (row / inner, row % inner), and the
// former again.
struct SoftmaxMaskRows {
  const char* data = nullptr;
  int64_t strides[3] = {};     // bytes: outer, middle, inner dimension of the rows
  int64_t step = 0;            // bytes between a row's elements
  uint32_t sizes[2] = {1, 1};  // of the middle and the inner dimension
  SoftmaxMask kind = SoftmaxMask::kNone;
};

struct SoftmaxArgs {
  SoftmaxRows grad;  // backward: of the result
  SoftmaxRows x;     // the scores; backward: the result
  SoftmaxRows out;   // the result; backward: the scores' gradient
  SoftmaxMaskRows mask;
  int64_t rows;
  int columns;
  float scale;      // not 0
  float pad;        // an infinity that the scale makes -inf
  uint32_t blocks;  // a row, where it has whole ones
  bool log;         // log_softmax
  bool vectors;     // all matrices' rows start at the same distance from a multiple of 16 bytes
};

inline constexpr int kSoftmaxVectorBytes = 16;

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_SOFTMAX_KERNELS_H_
