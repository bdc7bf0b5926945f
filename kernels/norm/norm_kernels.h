// SPDX-License-Identifier: Apache-2.0
// What the norms' launchers and their device code agree on: the kernels' arguments and tables.
#ifndef KERNELS_NORM_NORM_KERNELS_H_
#define KERNELS_NORM_NORM_KERNELS_H_

#include <cstdint>

#include "kernels/norm/norm.h"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

inline constexpr int kNormMaxThreads = 512;  // a block
inline constexpr int kNormNarrowThreads = 256;  // the same where rows are not on 16 bytes, backward
inline constexpr int kNormMaxCluster = 8;
inline constexpr int kNormMaxWarps = kNormMaxThreads / 32;
inline constexpr int64_t kNormMaxRows = int64_t{1} << 30;
inline constexpr int kNormMaxStages = 8;
inline constexpr int kNormReduceThreads = 256;

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
  int slice;            // columns a block
  int threads_per_row;  // of a block
  int bias_slots;       // where those of the bias begin in shared memory
  float inverse_columns;
  float eps;
  bool layer_norm;
  bool weight_float32;  // whatever x is
  bool bias_float32;
  bool early_launch;
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
  int stages;
  int weight_offset;  // in shared memory
  float inverse_columns;
  float eps;
  bool weight_float32;
  bool early_launch;
};

struct NormReduceArgs {
  const float* partial[2];  // weight's, bias's
  char* out[2];
  int parts;
  int columns;
  bool float32[2];
};

struct NormForwardKernel {
  DType dtype;
  bool wide;
  bool residual;
  int vectors;  // a thread
  Kernel kernel;
};

struct NormBackwardKernel {
  DType dtype;
  bool wide;  // rows begin and end on 16 bytes: the copy engine can fetch them
  NormKind kind;
  int vectors;
  Kernel kernel;
};

struct NormReduceKernel {
  DType dtype;
  Kernel kernel;
};

const NormForwardKernel* norm_forward_kernels(int* count);
const NormBackwardKernel* norm_backward_kernels(int* count);
const NormReduceKernel* norm_reduce_kernels(int* count);

// What a block may have on Hopper, less the kernels' own static share.
inline constexpr int kNormMaxDynamicSmem = 232448 - 6144;

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_KERNELS_H_
