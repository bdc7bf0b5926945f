# SPDX-License-Identifier: Apache-2.0
"""new_kernel: topk_softmax in CUDA C++, compiled by nvcc at the first call.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

import torch

import tiercel
from tiercel.plugins.types import Indices, Scores, Weights

CODE = r"""
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// The larger score first, then the smaller index: no two keys of a row are equal.
// NaN is above everything, 0.0 equals -0.0.
__device__ int64_t key_of(float score, int index) {
  int order = __float_as_int(score);
  if (order < 0) order ^= 0x7fffffff;
  if (score == 0.0f) order = 0;
  if (score != score) order = 0x7fffffff;
  return order * (int64_t{1} << 32) + (0x7fffffff - index);
}

// One thread a row: k times, take the largest score below the last one.
template <typename Score, typename Index>
__global__ void choose(const Score* scores, float* weights, Index* indices, int64_t rows,
                       int64_t row_stride, int64_t column_stride, int experts, int k,
                       bool all_scores) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  scores += row * row_stride;
  weights += row * k;
  indices += row * k;

  int64_t last = INT64_MAX;
  float largest = 0.0f;
  float total = 0.0f;
  for (int i = 0; i < k; ++i) {
    int64_t best = INT64_MIN;
    for (int e = 0; e < experts; ++e) {
      const int64_t key = key_of(static_cast<float>(scores[e * column_stride]), e);
      if (key < last && key > best) best = key;
    }
    const int index = 0x7fffffff - static_cast<int>(best & 0xffffffff);
    const float score = static_cast<float>(scores[index * column_stride]);
    if (i == 0) largest = score;
    weights[i] = expf(score - largest);  // NaN where the row has NaN or an infinity, as is due
    indices[i] = index;
    total += weights[i];
    last = best;
  }
  if (all_scores) {
    total = 0.0f;
    for (int e = 0; e < experts; ++e) {
      total += expf(static_cast<float>(scores[e * column_stride]) - largest);
    }
  }
  for (int i = 0; i < k; ++i) weights[i] /= total;
}

"""

THREADS = 64

CPP = {
    torch.float32: "float",
    torch.bfloat16: "__nv_bfloat16",
    torch.float16: "__half",
    torch.int32: "int",
    torch.int64: "long",
}
# All instances are compiled together, at the first launch.
DTYPES = [(score, index) for score in list(CPP)[:3] for index in list(CPP)[3:]]
NAMES = [f"choose<{CPP[score]}, {CPP[index]}>" for score, index in DTYPES]
KERNELS = dict(zip(DTYPES, tiercel.jit.cuda(CODE, NAMES), strict=True))


@tiercel.backends.register(
    op="topk_softmax",
    name="new_kernel",
    language="cuda",
    description="one thread a row, k passes over it",
)
def new_kernel(
    scores: Scores,  # [T, E] float32, bfloat16 or float16, any strides
    k: int,
    softmax_first: bool,
    renormalize: bool,
    indices_dtype: torch.dtype,  # torch.int32 or torch.int64
) -> tuple[Weights, Indices]:  # both [T, k]
    rows, experts = scores.shape
    weights = torch.empty(rows, k, dtype=torch.float32, device=scores.device)
    indices = torch.empty(rows, k, dtype=indices_dtype, device=scores.device)
    if rows == 0:
        return weights, indices
    KERNELS[scores.dtype, indices_dtype](
        (rows + THREADS - 1) // THREADS,
        THREADS,
        scores,
        weights,
        indices,
        rows,
        scores.stride(0),
        scores.stride(1),
        experts,
        k,
        softmax_first and not renormalize,
    )
    return weights, indices
