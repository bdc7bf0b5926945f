# SPDX-License-Identifier: Apache-2.0
"""new_kernel: rms_norm in Triton.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tiercel
from tiercel.plugins.types import (
    Normalised,
    NormBias,
    NormWeight,
    Residual,
    ResidualSum,
    Rows,
)


@triton.jit
def load_total(x, residual, columns, n, x_column, residual_column, has_residual: tl.constexpr):
    """x, or x + residual as it is stored: rounded to their dtype."""
    inside = n < columns
    total = tl.load(x + n * x_column, mask=inside, other=0.0).to(tl.float32)
    if has_residual:
        more = tl.load(residual + n * residual_column, mask=inside, other=0.0)
        total = (total + more.to(tl.float32)).to(x.dtype.element_ty).to(tl.float32)
    return total


@triton.jit
def new_kernel_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    residual_out,
    columns,
    eps,
    x_row,
    x_column,
    residual_row,
    residual_column,
    has_weight: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    block: tl.constexpr,
):
    """One row a program: the sum of squares, then the results."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    residual += row * residual_row
    out += row * columns
    residual_out += row * columns

    squares = tl.zeros((block,), dtype=tl.float32)
    for start in range(0, columns, block):
        n = (start + tl.arange(0, block)).to(tl.int64)
        total = load_total(x, residual, columns, n, x_column, residual_column, has_residual)
        squares += total * total
    scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / columns + eps)

    for start in range(0, columns, block):
        n = (start + tl.arange(0, block)).to(tl.int64)
        inside = n < columns
        total = load_total(x, residual, columns, n, x_column, residual_column, has_residual)
        if has_residual:
            tl.store(residual_out + n, total.to(out.dtype.element_ty), mask=inside)
        result = total * scale
        if has_weight:
            result *= tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
        if has_bias:
            result += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + n, result.to(out.dtype.element_ty), mask=inside)


@tiercel.backends.register(
    op="rms_norm",
    name="new_kernel",
    language="triton",
    description="one row a program, read twice",
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
    residual_out = out if residual is None else torch.empty_like(out)
    if out.numel() > 0:
        new_kernel_kernel[(rows,)](
            x,
            x if weight is None else weight,
            x if bias is None else bias,
            x if residual is None else residual,
            out,
            residual_out,
            columns,
            eps,
            *x.stride(),
            *(x if residual is None else residual).stride(),
            has_weight=weight is not None,
            has_bias=bias is not None,
            has_residual=residual is not None,
            block=min(triton.next_power_of_2(columns), 4096),
        )
    return out if residual is None else (out, residual_out)
