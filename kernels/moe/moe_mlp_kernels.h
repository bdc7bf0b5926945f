// SPDX-License-Identifier: Apache-2.0
// The interface between the host code of moe_up and moe_down and their compiled kernels
// (moe_cute.py).
#ifndef KERNELS_MOE_MOE_MLP_KERNELS_H_
#define KERNELS_MOE_MOE_MLP_KERNELS_H_

#include "kernels/moe/moe_mlp.h"
#include "kernels/sm90/cubin_kernel.h"

namespace tiercel {

struct MoeMlpVariant {
  DType dtype;
  bool block_scaled;  // a scale per 1x128 and 128x128 values, not per row
  bool up;
  MoeActivation activation;  // for `up`
  int tile_m;                // slots per block of the routing
  int tile_n;                // rows of weights per tile; for `up` half of them gates
  int cluster;               // thread blocks that share tiles of weights
  bool by_boxes;             // x is in the routing's order
};

// The kernel's parameters by the names that moe_arguments_cute.py gives them, and what each is. The
// order here does not matter: the build binds the compiled kernels' parameters to these members.
struct MoeMlpArguments {
  CUtensorMap w_map, x_map;  // x_map: of kernels that take x by boxes
  const void *x, *sorted_ids, *expert_ids, *used, *counter, *progress, *weights, *ids, *x_scale,
      *w_scale, *out_scale;
  void* out;
  int32_t experts, w_rows, k, second, rows, elements, divide, x_pieces, id_words, bound, early,
      x_scale_step, w_scale_expert, w_scale_step, x_rows, to_slots, listed;
};

using MoeMlpKernel = CubinKernel<MoeMlpVariant>;

// All compiled kernels.
const MoeMlpKernel* moe_mlp_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_MOE_MOE_MLP_KERNELS_H_
