// SPDX-License-Identifier: Apache-2.0
// What attention's launcher and its compiled kernels (attention_cute.py) agree on.
#ifndef KERNELS_ATTENTION_ATTENTION_KERNELS_H_
#define KERNELS_ATTENTION_ATTENTION_KERNELS_H_

#include "kernels/attention/attention.h"
#include "kernels/sm90/cubin_kernel.h"

namespace tiercel {

enum class AttentionMask { kNone, kCausal, kWindow };

struct AttentionVariant {
  DType dtype;
  int d;  // of the tiles; smaller head dimensions are filled up with zeros
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

#endif  // KERNELS_ATTENTION_ATTENTION_KERNELS_H_
