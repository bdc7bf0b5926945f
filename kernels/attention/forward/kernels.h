// SPDX-License-Identifier: Apache-2.0
// The table of the forward kernels: functions.py declares them, forward.cc chooses and launches
// one.
#ifndef KERNELS_ATTENTION_FORWARD_KERNELS_H_
#define KERNELS_ATTENTION_FORWARD_KERNELS_H_

#include "kernels/attention/common/options.h"
#include "kernels/sm90/cubin_kernel.h"

namespace tiercel {

struct AttentionVariant {
  DType dtype;
  int d;    // columns of q and k; smaller head dimensions are filled up with zeros
  int d_v;  // and of v
  int tile_m;
  int tile_n;
  AttentionMask mask;
  bool capped;
  bool packed;
};

using AttentionKernel = CubinKernel<AttentionVariant>;

// All kernels, as compiled.
const CubinKernel<AttentionVariant>* attention_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_FORWARD_KERNELS_H_
