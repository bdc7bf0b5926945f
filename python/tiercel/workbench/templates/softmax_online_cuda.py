# SPDX-License-Identifier: Apache-2.0
"""new_kernel: softmax_online in CUDA C++, compiled by nvcc at the first call.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

import torch

import tiercel
from tiercel.plugins.types import SoftmaxMask, SoftmaxResult, SoftmaxScores

CODE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

// A maximum, and the sum of exp(score - maximum). While the maximum is -inf, 0 stands in for it:
// -inf less -inf is NaN.
struct State {
  float largest, total;

  __device__ float base() const { return largest == -CUDART_INF_F ? 0.0f : largest; }

  __device__ void add(float other_largest, float other_total) {
    const State before = *this;
    largest = fmaxf(largest, other_largest);
    total = before.total * expf(before.largest - base()) +
            other_total * expf(other_largest - base());
  }
};

// One block a row: its maximum and sum together, then the results.
template <typename T, typename Mask>
__global__ void softmax_online(const T* x, const Mask* mask, T* out, int columns, float scale,
                               long x_row, long x_column, long mask_row, long mask_column) {
  const long row = blockIdx.x;
  x += row * x_row;
  mask += mask == nullptr ? 0 : row * mask_row;
  out += row * columns;
  auto load = [&](int i) {
    const float score = float(x[i * x_column]) * scale;
    if (mask == nullptr) return score;
    const Mask value = mask[i * mask_column];
    // A bool says what to keep, a float is added.
    if (sizeof(Mask) == 1) return value ? score : -CUDART_INF_F;
    return score + float(value);
  };

  State state{-CUDART_INF_F, 0.0f};
  for (int i = threadIdx.x; i < columns; i += blockDim.x) state.add(load(i), 1.0f);
  for (int step = 16; step > 0; step /= 2) {
    const float largest = __shfl_xor_sync(~0u, state.largest, step);
    const float total = __shfl_xor_sync(~0u, state.total, step);
    state.add(largest, total);
  }
  __shared__ State states[32];
  if (threadIdx.x % 32 == 0) states[threadIdx.x / 32] = state;
  __syncthreads();
  state = states[0];
  for (int warp = 1; warp < blockDim.x / 32; ++warp) {
    state.add(states[warp].largest, states[warp].total);
  }

  // A row of -inf alone is 0 / 0: NaN, as is due.
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    out[i] = T(expf(load(i) - state.base()) / state.total);
  }
}
"""

THREADS = 256
CPP = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
MASKS = {torch.bool: "bool", torch.float32: "float"}
# All instances are compiled together, at the first launch.
VARIANTS = [(dtype, mask) for dtype in CPP for mask in MASKS]
NAMES = [f"softmax_online<{CPP[dtype]}, {MASKS[mask]}>" for dtype, mask in VARIANTS]
KERNELS = dict(zip(VARIANTS, tiercel.jit.cuda(CODE, NAMES), strict=True))


@tiercel.backends.register(
    op="softmax_online",
    name="new_kernel",
    language="cuda",
    description="one block a row, read twice",
)
def new_kernel(
    x: SoftmaxScores,  # [M, N] float32, bfloat16 or float16, any strides
    mask: SoftmaxMask,  # [M, N] bool, float32 or None, any strides
    dim: int,  # the last
    scale: float | None,
) -> SoftmaxResult:  # [M, N], the dtype of x
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    KERNELS[x.dtype, torch.bool if mask is None else mask.dtype](
        rows,
        THREADS,
        x,
        mask,
        out,
        columns,
        1.0 if scale is None else scale,
        *x.stride(),
        *((0, 0) if mask is None else mask.stride()),
    )
    return out
