// SPDX-License-Identifier: Apache-2.0
// A piece of work for the compiler that never changes: a change of it would change the unit of
// kernels/budget.json. Each kernel multiplies a small matrix by itself, unrolled.
#ifndef TOOLS_CUDA_REFERENCE_REFERENCE_CUH_
#define TOOLS_CUDA_REFERENCE_REFERENCE_CUH_

#include <utility>

namespace tiercel {
namespace {

template <int kIndex>
__global__ void reference_kernel(float* data, int count) {
  constexpr int kSize = kIndex % 6 + 5;
  float a[kSize][kSize], b[kSize][kSize];
#pragma unroll
  for (int i = 0; i < kSize * kSize; ++i) {
    const int at = i * blockDim.x + threadIdx.x;
    a[i / kSize][i % kSize] = at < count ? data[at] : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < kSize; ++k) sum = fmaf(a[i][k], a[k][j], sum);
      b[i][j] = sum > 0.0f ? sum : expf(sum);
    }
  }
#pragma unroll
  for (int i = 0; i < kSize * kSize; ++i) {
    const int at = i * blockDim.x + threadIdx.x;
    if (at < count) data[at] = b[i / kSize][i % kSize];
  }
}

template <int... kIndices>
const void* reference_kernels(std::integer_sequence<int, kIndices...>) {
  const void* kernels[] = {reinterpret_cast<const void*>(reference_kernel<kIndices>)...};
  return kernels[0];
}

}  // namespace
}  // namespace tiercel

#endif  // TOOLS_CUDA_REFERENCE_REFERENCE_CUH_
