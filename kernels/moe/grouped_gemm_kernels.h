// SPDX-License-Identifier: Apache-2.0
// The interface between grouped_gemm's host code and its compiled kernels (grouped_cute.py).
#ifndef KERNELS_MOE_GROUPED_GEMM_KERNELS_H_
#define KERNELS_MOE_GROUPED_GEMM_KERNELS_H_

#include "kernels/moe/grouped_gemm.h"
#include "kernels/sm90/cubin_kernel.h"

namespace tiercel {

struct GroupedGemmVariant {
  DType dtype;
  GroupedKind kind;
  int tile_m;
  int tile_n;
};

// The kernel's parameters by the names that grouped_gemm_cute.py gives them. The order here does
// not matter: the build binds the compiled kernels' parameters to these members.
struct GroupedGemmArguments {
  CUtensorMap a_map, b_map, out_map;
  const void* offsets;
  void* out;
  const void *x_scale, *w_scale;
  int32_t groups, m, n, k, offset_words;
  int32_t capacity, x_group, x_step, x_across;  // of float8 kernels only
};

using GroupedGemmKernel = CubinKernel<GroupedGemmVariant>;

// All kernels, as compiled.
const GroupedGemmKernel* grouped_gemm_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_MOE_GROUPED_GEMM_KERNELS_H_
