// SPDX-License-Identifier: Apache-2.0
// The interface of the activations' host and device code: the kernels' argument and tables.
#ifndef KERNELS_ACTIVATION_ACTIVATION_KERNELS_H_
#define KERNELS_ACTIVATION_ACTIVATION_KERNELS_H_

#include <cstdint>

#include "kernels/activation/activation.h"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// A matrix of contiguous rows, a constant stride apart.
struct ActivationRows {
  char* data;
  char* end;           // behind the last element
  int64_t row_stride;  // bytes
};

struct ActivationArgs {
  ActivationRows grad;     // backward: of the forward's output
  ActivationRows x;        // the input of f, the gate if gated
  ActivationRows up;       // gated: the other factor
  ActivationRows out;      // forward: the result; backward: x's gradient
  ActivationRows up_grad;  // backward, gated
  ActivationRows result;   // backward, gated: the forward's result, where `data` is not null
  const float* scale;      // float8 results
  int64_t columns;
  uint32_t vectors;  // of 16 bytes, in all rows
  uint32_t vectors_per_thread;
  uint32_t row_vectors;      // per row; the last one may be partial
  uint32_t row_vectors_inv;  // floor(2^32 / row_vectors)
  bool aligned;              // every row of every matrix is aligned to its vectors
};

struct ActivationKernel {
  ActivationFunction function;
  DType dtype;
  DType out_dtype;
  bool gated;
  bool shifted;  // rows may begin at any element
  Kernel kernel;
};

inline constexpr int kActivationVectorBytes = 16;
// Threads per block with many vectors (measured on an H200) and with few, where smaller blocks use
// more multiprocessors.
inline constexpr unsigned kActivationForwardThreads = 1024;
inline constexpr unsigned kActivationPlainThreads = 128;
inline constexpr unsigned kActivationShiftedThreads = 256;
inline constexpr unsigned kActivationBackwardThreads = 256;
inline constexpr unsigned kActivationFewThreads = 128;
// The most vectors per thread. One vector of a single matrix would leave too few bytes in flight.
constexpr unsigned activation_forward_vectors(bool gated) { return gated ? 1 : 2; }

const ActivationKernel* activation_forward_kernels(int* count);
const ActivationKernel* activation_backward_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_ACTIVATION_ACTIVATION_KERNELS_H_
