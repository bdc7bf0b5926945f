// SPDX-License-Identifier: Apache-2.0
// The interface of moe_rows' host and device code: the kernels' arguments and tables.
#ifndef KERNELS_MOE_MOE_ROWS_KERNELS_H_
#define KERNELS_MOE_MOE_ROWS_KERNELS_H_

#include <cstdint>

#include "kernels/moe/moe_mlp.h"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_view.h"

namespace tiercel {

struct MoePlacesArgs {
  const uint32_t* sorted_ids;
  const uint32_t* expert_ids;  // the largest number behind all experts' rows
  uint32_t* places;
  uint32_t* offsets;
  uint32_t elements;
  uint32_t experts;
};

// Columns are counted in vectors of 16 bytes.
struct MoeSpreadArgs {
  const char* x;
  const uint32_t* places;
  char* out;
  int64_t row_stride;  // bytes
  int64_t tokens;
  uint32_t elements;
  int columns;
  int k;
};

struct MoeCollectArgs {
  const char* x;
  const uint32_t* places;
  const float* weights;  // or null
  char* out;
  int64_t tokens;
  uint32_t elements;
  int columns;
  int k;
};

struct MoeGateArgs {
  char* inner;  // backward: the gradient, and then inner times the weight
  const char* pre;
  char* grad_pre;
  const uint32_t* places;
  const float* weights;
  float* grad_weights;
  uint32_t elements;
  int columns;  // of inner
};

inline constexpr unsigned kMoeRowThreads = 256;  // per block, at most
inline constexpr unsigned kMoeGateWarps = 8;     // an element each

struct MoeCollectKernel {
  DType dtype;
  Kernel kernel;
};

struct MoeGateKernel {
  MoeActivation activation;
  DType dtype;
  bool backward;
  Kernel kernel;
};

extern const Kernel kMoePlaces;
extern const Kernel kMoeSpread;
const MoeCollectKernel* moe_collect_kernels(int* count);
const MoeGateKernel* moe_gate_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_MOE_MOE_ROWS_KERNELS_H_
