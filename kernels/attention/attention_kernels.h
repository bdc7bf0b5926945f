// SPDX-License-Identifier: Apache-2.0
// What attention's launcher and its compiled kernels (attention_family_cute.py) agree on.
#ifndef KERNELS_ATTENTION_ATTENTION_KERNELS_H_
#define KERNELS_ATTENTION_ATTENTION_KERNELS_H_

#include "kernels/attention/attention.h"
#include "kernels/sm90/cubin_kernel.h"

namespace tiercel {

struct AttentionVariant {
  DType dtype;
  int d;
  int tile_m;
  int tile_n;
  bool causal;
};

using AttentionKernel = CubinKernel<AttentionVariant>;

// All kernels, as compiled.
const CubinKernel<AttentionVariant>* attention_kernels(int* count);

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_ATTENTION_KERNELS_H_
