# SPDX-License-Identifier: Apache-2.0
"""new_kernel: silu_and_mul in Triton.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tiercel
from tiercel.plugins.types import Factor, GatedResult, GateInput


@triton.jit
def new_kernel_kernel(x, up, out, columns, x_row, x_column, up_row, up_column, block: tl.constexpr):
    """A block of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    n = (tl.program_id(1) * block + tl.arange(0, block)).to(tl.int64)
    inside = n < columns
    gate = tl.load(x + row * x_row + n * x_column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_row + n * up_column, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * factor
    tl.store(out + row * columns + n, result.to(out.dtype.element_ty), mask=inside)


@tiercel.backends.register(
    op="silu_and_mul",
    name="new_kernel",
    language="triton",
    description="a block of one row a program",
)
def new_kernel(
    x: GateInput,  # [M, N] float32, bfloat16 or float16, any strides
    up: Factor,  # [M, N], the same dtype, any strides
) -> GatedResult:  # [M, N], the dtype of x
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block = min(triton.next_power_of_2(columns), 1024)
    new_kernel_kernel[(rows, triton.cdiv(columns, block))](
        x, up, out, columns, *x.stride(), *up.stride(), block=block
    )
    return out
