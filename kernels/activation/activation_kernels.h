// SPDX-License-Identifier: Apache-2.0
// What the activations' launcher and their device code agree on: the kernels' argument and tables.
#ifndef KERNELS_ACTIVATION_ACTIVATION_KERNELS_H_
#define KERNELS_ACTIVATION_ACTIVATION_KERNELS_H_

#include <cstdint>

#include "kernels/activation/activation.h"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

// One matrix with equally distant rows; elements of a row are neighbours.
struct ActivationRows {
  char* data;
  char* end;           // behind the last element
  int64_t row_stride;  // bytes
};

struct ActivationArgs {
  ActivationRows grad;     // backward: of the forward's output
  ActivationRows x;        // what the activation is applied to: the gate
  ActivationRows up;       // gated: the other factor
  ActivationRows out;      // forward: the result; backward: x's gradient
  ActivationRows up_grad;  // backward, gated
  const float* scale;      // float8 results
  int64_t columns;
  uint32_t vectors;          // of 16 bytes, all rows
  uint32_t of_thread;        // of them
  uint32_t row_vectors;      // of a row, the last one possibly in part
  uint32_t row_vectors_inv;  // floor(2^32 / row_vectors)
  bool aligned;              // every row of every matrix starts at a multiple of its vector
};

struct ActivationKernel {
  ActivationFunction function;
  DType dtype;
  DType out_dtype;
  bool gated;
  bool shifted;  // rows at any distance from a multiple of 16 bytes
  Kernel kernel;
};

inline constexpr int kActivationVectorBytes = 16;
// Threads of a block where vectors are many (measured on an H200), and where they are few: these
// are on more multiprocessors.
inline constexpr unsigned kActivationForwardThreads = 1024;
inline constexpr unsigned kActivationPlainThreads = 128;
inline constexpr unsigned kActivationShiftedThreads = 256;
inline constexpr unsigned kActivationBackwardThreads = 256;
inline constexpr unsigned kActivationFewThreads = 128;
// A thread's vectors, at most: where it reads one matrix only, that is too little on the way with
// one.
constexpr unsigned activation_forward_vectors(bool gated) { return gated ? 1 : 2; }

const ActivationKernel* activation_forward_kernels(int* count);
const ActivationKernel* activation_backward_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_ACTIVATION_ACTIVATION_KERNELS_H_
