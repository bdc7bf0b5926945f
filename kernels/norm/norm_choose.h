// SPDX-License-Identifier: Apache-2.0
// Chooses a norm's kernel and its launch from sizes, alignment and properties of the device.
#ifndef KERNELS_NORM_NORM_CHOOSE_H_
#define KERNELS_NORM_NORM_CHOOSE_H_

#include <cstdint>

#include "kernels/norm/norm_kernels.h"

namespace tiercel {

struct NormProblem {
  NormKind kind;
  DType dtype;
  int64_t rows;
  int columns;
  bool aligned16;  // rows begin and end on 16 bytes
  int streams;     // tensors of [rows, columns] that are read
  int multiprocessors;
  bool plain;  // forward: parameters of x's dtype, and no bias but a layer norm's;
               // backward: a weight on 16 bytes, or none
  // Backward only:
  int memory_gbps = 0;  // 0: unknown
  int device = -1;      // the index whose tuned configurations apply; -1: none
  const NormBackwardConfig* config = nullptr;  // what to launch; null: the best known
};

template <typename Kernel>
struct NormChoice {
  const Kernel* kernel = nullptr;
  int threads_per_row = 0;
  int slice = 0;    // columns per block
  int cluster = 1;  // blocks that share a row
  int block = 0;
  int grid = 0;
  int dynamic_smem = 0;
  int stages = 0;         // backward
  int prefetch = 0;       // forward: blocks per multiprocessor that prefetch; backward: rows per
                          // team beyond its stages
  int weight_offset = 0;  // backward
  bool paired = false;    // backward: the two blocks of a cluster have rows of their own

  int parts() const { return grid / cluster; }
};

// `kernel` is null if there is none for so many columns.
NormChoice<NormForwardKernel> choose_norm_forward(const NormProblem& problem);
NormChoice<NormBackwardKernel> choose_norm_backward(const NormProblem& problem);

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_CHOOSE_H_
