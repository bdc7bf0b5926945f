// SPDX-License-Identifier: Apache-2.0
// What the launchers of moe_up and moe_down and their compiled kernels (moe_cute.py) agree on.
#ifndef KERNELS_MOE_MOE_MLP_KERNELS_H_
#define KERNELS_MOE_MOE_MLP_KERNELS_H_

#include "kernels/moe/moe_mlp.h"
#include "kernels/sm90/cubin_kernel.h"

namespace tiercel {

struct MoeMlpVariant {
  DType dtype;
  bool block_scaled;  // 1x128 and 128x128 values a scale, instead of a row
  bool up;
  MoeActivation activation;  // of `up`
  int tile_m;                // slots of the routing's blocks
  int tile_n;                // rows of weights, a tile; for `up` half of them of each half
  int cluster;               // blocks that share tiles of weights, one below the other
  bool by_boxes;             // x is in the routing's order
};

using MoeMlpKernel = CubinKernel<MoeMlpVariant>;

// All kernels, as compiled.
const MoeMlpKernel* moe_mlp_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_MOE_MOE_MLP_KERNELS_H_
