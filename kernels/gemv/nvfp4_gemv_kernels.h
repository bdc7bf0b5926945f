// SPDX-License-Identifier: Apache-2.0
// The interface of nvfp4_gemv's host and device code.
#ifndef KERNELS_GEMV_NVFP4_GEMV_KERNELS_H_
#define KERNELS_GEMV_NVFP4_GEMV_KERNELS_H_

#include <cstdint>

#include "kernels/sm90/launch.h"

namespace tiercel {

struct Nvfp4GemvArgs {
  const char* a;
  int64_t a_row, a_batch;  // bytes
  const char* b;
  int64_t b_batch;
  const char* scale_a;  // permuted
  int64_t scale_a_batch;
  const char* scale_b;
  int64_t scale_b_batch;
  uint16_t* c;
  int64_t c_row, c_batch;  // elements
  int rows;
  int k;
  int scale_atoms;  // of 128 rows by 4 scales, along K
  int quads;        // groups of four rows, see the kernel
  int parts;        // warps that split K of a quad
};

inline constexpr int kGemvStep = 1024;  // values of K per step of a warp
inline constexpr int kGemvMaxThreads = 896;
inline constexpr int kGemvMaxK = 131072;

// Shared memory per block: b as int8, its scales as float32, and four sums per warp.
constexpr int gemv_shared_bytes(int k, int warps) {
  return (k + kGemvStep - 1) / kGemvStep * (kGemvStep + kGemvStep / 16 * 4) + warps * 16;
}

const Kernel* nvfp4_gemv_kernel();

}  // namespace tiercel

#endif  // KERNELS_GEMV_NVFP4_GEMV_KERNELS_H_
