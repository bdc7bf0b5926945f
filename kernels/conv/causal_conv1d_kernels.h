// SPDX-License-Identifier: Apache-2.0
// The interface of the convolutions' host and device code: the kernels' arguments and table.
#ifndef KERNELS_CONV_CAUSAL_CONV1D_KERNELS_H_
#define KERNELS_CONV_CAUSAL_CONV1D_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// The sequences: the rows between two starts, or `length` rows each.
struct ConvSequences {
  const int* starts;   // [count + 1], or null
  int64_t start_step;  // elements
  int count;
  int64_t length;
  int64_t rows;
};

// Strides in bytes.
struct ConvArgs {
  ConvSequences sequences;
  const char* x;
  int64_t x_stride;
  const char* weight;
  const char* bias;  // or null
  char* out;
  int64_t out_stride;
  int columns;
  int width;
  bool silu;
  bool vectors;  // weight and bias lie on 16 bytes
  int64_t rows_per_thread;
  char* states;  // or null
  int64_t slot_stride;
  int64_t slots;
  const int* state_indices;  // or null
  const bool* has_state;     // or null
};

struct ConvBackwardArgs {
  ConvSequences sequences;
  const char* x;
  int64_t x_stride;
  const char* weight;
  const char* bias;  // or null
  const char* grad;
  int64_t grad_stride;
  char* dx;
  int64_t dx_stride;
  float* sums;
  int64_t parts;
  int columns;
  int width;
  bool silu;
  bool vectors;  // weight and bias lie on 16 bytes
  int64_t rows_per_thread;
};

struct ConvKernel {
  DType dtype;
  Kernel kernel;
};

inline constexpr int kConvWidth = 4;  // at most
inline constexpr int kConvThreads = 256;
inline constexpr int kConvBlocks = 3;        // of a multiprocessor
inline constexpr int kConvAheadBytes = 128;  // of a thread's inputs in shared memory
inline constexpr int kConvBackwardThreads = 128;
inline constexpr int kConvVectorBytes = 16;  // of filters
inline constexpr int kConvChannels = 4;      // per thread

const ConvKernel* causal_conv1d_kernels(int* count);
const ConvKernel* causal_conv1d_backward_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_CONV_CAUSAL_CONV1D_KERNELS_H_
