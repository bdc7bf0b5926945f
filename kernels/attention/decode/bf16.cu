// SPDX-License-Identifier: Apache-2.0
// The instances of decode_attention for bfloat16 queries and caches; kernel.cuh has the plan.
#include "kernels/attention/decode/instances.cuh"

namespace tiercel {
namespace {

// Tiles of 32 rows are only spread: short sequences have more blocks with tiles of 16.
const DecodeKernel kKernels[] = {TIERCEL_DECODE_TABLE(BFloat16, false),
                                 TIERCEL_DECODE(BFloat16, false, 128, false, 4, true, 1)};

}  // namespace

const DecodeKernel* decode_kernels_bf16(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
