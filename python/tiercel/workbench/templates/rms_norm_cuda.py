# SPDX-License-Identifier: Apache-2.0
"""new_kernel: rms_norm in CUDA C++, compiled by nvcc at the first call.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

import torch

import tiercel
from tiercel.plugins.types import (
    Normalised,
    NormBias,
    NormWeight,
    Residual,
    ResidualSum,
    Rows,
)

CODE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// The sum over a block of whole warps, in every thread.
__device__ float block_sum(float value) {
  __shared__ float sums[32];
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) total += sums[warp];
  return total;
}

// One block a row, which is read twice: the sum of squares, then the results.
template <typename T, typename Weight, typename Bias>
__global__ void rms_norm(const T* x, const Weight* weight, const Bias* bias, const T* residual,
                         T* out, T* residual_out, int columns, float eps, long x_row,
                         long x_column, long residual_row, long residual_column) {
  const long row = blockIdx.x;
  x += row * x_row;
  out += row * columns;
  if (residual != nullptr) {
    residual += row * residual_row;
    residual_out += row * columns;
  }
  // x, or x + residual as it is stored: rounded to their dtype.
  auto load = [&](int i) {
    const float value = float(x[i * x_column]);
    if (residual == nullptr) return value;
    return float(T(value + float(residual[i * residual_column])));
  };

  float squares = 0.0f;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    const float value = load(i);
    squares += value * value;
  }
  const float scale = rsqrtf(block_sum(squares) / columns + eps);
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    const float value = load(i);
    if (residual != nullptr) residual_out[i] = T(value);
    float result = value * scale;
    if (weight != nullptr) result *= float(weight[i]);
    if (bias != nullptr) result += float(bias[i]);
    out[i] = T(result);
  }
}
"""

THREADS = 256
CPP = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
# Weight and bias have the dtype of x or float32. All instances are compiled together, at the first
# launch.
VARIANTS = [
    (dtype, weight, bias)
    for dtype in CPP
    for weight in {dtype: 0, torch.float32: 0}
    for bias in {dtype: 0, torch.float32: 0}
]
NAMES = [f"rms_norm<{', '.join(CPP[dtype] for dtype in dtypes)}>" for dtypes in VARIANTS]
KERNELS = dict(zip(VARIANTS, tiercel.jit.cuda(CODE, NAMES), strict=True))


@tiercel.backends.register(
    op="rms_norm",
    name="new_kernel",
    language="cuda",
    description="one block a row, read twice",
)
def new_kernel(
    x: Rows,  # [M, N] float32, bfloat16 or float16, any strides
    weight: NormWeight,  # [N], the dtype of x or float32, or None
    bias: NormBias,  # [N] or None
    residual: Residual,  # [M, N] or None, the dtype of x, any strides
    eps: float,
) -> Normalised | tuple[Normalised, ResidualSum]:  # both [M, N]; the sum only with a residual
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    residual_out = None if residual is None else torch.empty_like(out)
    if out.numel() > 0:
        dtypes = [x.dtype if tensor is None else tensor.dtype for tensor in (x, weight, bias)]
        KERNELS[tuple(dtypes)](
            rows,
            THREADS,
            x,
            weight,
            bias,
            residual,
            out,
            residual_out,
            columns,
            eps,
            *x.stride(),
            *((0, 0) if residual is None else residual.stride()),
        )
    return out if residual_out is None else (out, residual_out)
