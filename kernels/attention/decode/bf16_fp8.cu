// SPDX-License-Identifier: Apache-2.0
// The instances of decode_attention for bfloat16 queries and float8 caches; kernel.cuh has the
// plan.
#include "kernels/attention/decode/instances.cuh"

namespace tiercel {
namespace {

const DecodeKernel kKernels[] = {TIERCEL_DECODE_TABLE(BFloat16, true)};

}  // namespace

const DecodeKernel* decode_kernels_bf16_fp8(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
