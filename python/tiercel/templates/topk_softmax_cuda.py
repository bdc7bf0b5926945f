# SPDX-License-Identifier: Apache-2.0
"""new_kernel: topk_softmax in CUDA C++, compiled by nvcc at the first call.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

import ctypes

import torch

import tiercel
from tiercel.plugins import cuda
from tiercel.plugins.types import Indices, Scores, Weights

CODE = cuda.Source(r"""
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
__device__ void choose(const Score* scores, float* weights, Index* indices, int64_t rows,
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

#define KERNEL(name, Score, Index)                                                           \
  extern "C" __global__ void name(const Score* scores, float* weights, Index* indices,       \
                                  int64_t rows, int64_t row_stride, int64_t column_stride,   \
                                  int experts, int k, bool all_scores) {                     \
    choose(scores, weights, indices, rows, row_stride, column_stride, experts, k, all_scores); \
  }
KERNEL(float32_int32, float, int32_t)
KERNEL(float32_int64, float, int64_t)
KERNEL(bfloat16_int32, __nv_bfloat16, int32_t)
KERNEL(bfloat16_int64, __nv_bfloat16, int64_t)
KERNEL(float16_int32, __half, int32_t)
KERNEL(float16_int64, __half, int64_t)
""")

THREADS = 64


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
    CODE.launch(
        f"{scores.dtype}_{indices_dtype}".replace("torch.", ""),
        [(rows + THREADS - 1) // THREADS],
        [THREADS],
        scores,
        weights,
        indices,
        ctypes.c_int64(rows),
        ctypes.c_int64(scores.stride(0)),
        ctypes.c_int64(scores.stride(1)),
        ctypes.c_int(experts),
        ctypes.c_int(k),
        ctypes.c_bool(softmax_first and not renormalize),
    )
    return weights, indices
