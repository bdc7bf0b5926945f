# SPDX-License-Identifier: Apache-2.0
"""new_kernel: linear_act in CUDA C++, compiled by nvcc at the first call.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

import torch

import tiercel
from tiercel.plugins.types import Activated, Bias, Features, Weight

CODE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

enum { kNone, kRelu, kSilu, kGelu, kGeluTanh };

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <int activation>
__device__ float activate(float x) {
  if (activation == kRelu) return x < 0.0f ? 0.0f : x;
  if (activation == kSilu) return x * sigmoid(x);
  if (activation == kGelu) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  if (activation == kGeluTanh) return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
  return x;
}

// One block a tile of 16x16 outputs, 16 columns of x and weight at a time through shared memory.
template <typename T, int activation>
__global__ void linear_act(const T* x, const T* weight, const T* bias, T* out, int rows,
                           int columns, int depth, long x_row, long x_step, long w_row,
                           long w_step, long bias_step) {
  constexpr int kTile = 16;
  __shared__ float x_tile[kTile][kTile + 1], w_tile[kTile][kTile + 1];
  const int i = threadIdx.y, j = threadIdx.x;
  const int row = blockIdx.y * kTile + i, column = blockIdx.x * kTile + j;
  const int w_column = blockIdx.x * kTile + i;  // of weight, whose rows are the output's columns
  float sum = 0.0f;
  for (int k = 0; k < depth; k += kTile) {
    const bool inside = k + j < depth;
    x_tile[i][j] = inside && row < rows ? float(x[row * x_row + (k + j) * x_step]) : 0.0f;
    w_tile[i][j] =
        inside && w_column < columns ? float(weight[w_column * w_row + (k + j) * w_step]) : 0.0f;
    __syncthreads();
    for (int step = 0; step < kTile; ++step) sum += x_tile[i][step] * w_tile[j][step];
    __syncthreads();
  }
  if (row >= rows || column >= columns) return;
  if (bias != nullptr) sum += float(bias[column * bias_step]);
  out[row * static_cast<long>(columns) + column] = T(activate<activation>(sum));
}
"""

TILE = 16
CPP = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh")
# All instances are compiled together, at the first launch.
VARIANTS = [(dtype, activation) for dtype in CPP for activation in ACTIVATIONS]
NAMES = [f"linear_act<{CPP[dtype]}, {ACTIVATIONS.index(act)}>" for dtype, act in VARIANTS]
KERNELS = dict(zip(VARIANTS, tiercel.jit.cuda(CODE, NAMES), strict=True))


@tiercel.backends.register(
    op="linear_act",
    name="new_kernel",
    language="cuda",
    description="tiles of 16x16 in shared memory",
)
def new_kernel(
    x: Features,  # [M, K] bfloat16 or float16, any strides
    weight: Weight,  # [N, K], the same dtype
    bias: Bias,  # [N] or None
    activation: str,  # none, relu, silu, gelu or gelu_tanh
) -> Activated:  # [M, N], the dtype of x
    (rows, depth), columns = x.shape, weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    KERNELS[x.dtype, activation](
        [(columns + TILE - 1) // TILE, (rows + TILE - 1) // TILE],
        [TILE, TILE],
        x,
        weight,
        bias,
        out,
        rows,
        columns,
        depth,
        *x.stride(),
        *weight.stride(),
        0 if bias is None else bias.stride(0),
    )
    return out
