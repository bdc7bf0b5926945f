# SPDX-License-Identifier: Apache-2.0
"""new_kernel: silu_and_mul in CUDA C++, compiled by nvcc at the first call.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

import torch

import tiercel
from tiercel.plugins.types import Factor, GatedResult, GateInput

CODE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// One thread an element.
template <typename T>
__global__ void silu_and_mul(const T* x, const T* up, T* out, long elements, int columns,
                             long x_row, long x_column, long up_row, long up_column) {
  const long i = blockIdx.x * long(blockDim.x) + threadIdx.x;
  if (i >= elements) return;
  const long row = i / columns, column = i % columns;
  const float gate = float(x[row * x_row + column * x_column]);
  const float factor = float(up[row * up_row + column * up_column]);
  out[i] = T(gate / (1.0f + expf(-gate)) * factor);
}
"""

THREADS = 256
CPP = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
# All instances are compiled together, at the first launch.
NAMES = [f"silu_and_mul<{name}>" for name in CPP.values()]
KERNELS = dict(zip(CPP, tiercel.jit.cuda(CODE, NAMES), strict=True))


@tiercel.backends.register(
    op="silu_and_mul",
    name="new_kernel",
    language="cuda",
    description="one thread an element",
)
def new_kernel(
    x: GateInput,  # [M, N] float32, bfloat16 or float16, any strides
    up: Factor,  # [M, N], the same dtype, any strides
) -> GatedResult:  # [M, N], the dtype of x
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    elements = rows * columns
    if elements > 0:
        blocks = (elements + THREADS - 1) // THREADS
        KERNELS[x.dtype](blocks, THREADS, x, up, out, elements, columns, *x.stride(), *up.stride())
    return out
