// SPDX-License-Identifier: Apache-2.0
// What grouped_gemm's launcher and its compiled kernels (grouped_cute.py) agree on.
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

using GroupedGemmKernel = CubinKernel<GroupedGemmVariant>;

// All kernels, as compiled.
const GroupedGemmKernel* grouped_gemm_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_MOE_GROUPED_GEMM_KERNELS_H_
