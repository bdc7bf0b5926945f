# SPDX-License-Identifier: Apache-2.0
"""new_kernel: softmax_online in Triton.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tiercel
from tiercel.plugins.types import SoftmaxMask, SoftmaxResult, SoftmaxScores


@triton.jit
def load_scores(x, mask, columns, scale, n, x_column, mask_column, kind: tl.constexpr):
    """Scores with the mask applied; -inf, which adds nothing, beyond the row."""
    inside = n < columns
    scores = tl.load(x + n * x_column, mask=inside, other=0.0).to(tl.float32) * scale
    if kind == 1:  # bool: what to keep
        keep = tl.load(mask + n * mask_column, mask=inside, other=0)
        scores = tl.where(keep != 0, scores, -float("inf"))
    elif kind == 2:  # float32: what to add
        scores += tl.load(mask + n * mask_column, mask=inside, other=0.0)
    return tl.where(inside, scores, -float("inf"))


@triton.jit
def new_kernel_kernel(
    x,
    mask,
    out,
    columns,
    scale,
    x_row,
    x_column,
    mask_row,
    mask_column,
    kind: tl.constexpr,  # 0 without a mask, 1 for bool, 2 for float32
    block: tl.constexpr,
):
    """One row a program: its maximum and sum together, then the results."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    mask += row * mask_row
    out += row * columns

    largest = -float("inf")
    base = 0.0  # the largest, or 0 while that is -inf: -inf less -inf is NaN
    total = 0.0
    for start in range(0, columns, block):
        n = (start + tl.arange(0, block)).to(tl.int64)
        scores = load_scores(x, mask, columns, scale, n, x_column, mask_column, kind)
        before = largest
        largest = tl.maximum(before, tl.max(scores, axis=0))
        base = tl.where(largest == -float("inf"), 0.0, largest)
        total = total * tl.exp(before - base) + tl.sum(tl.exp(scores - base), axis=0)

    for start in range(0, columns, block):
        n = (start + tl.arange(0, block)).to(tl.int64)
        scores = load_scores(x, mask, columns, scale, n, x_column, mask_column, kind)
        # A row of -inf alone is 0 / 0: NaN, as is due.
        result = tl.exp(scores - base) / total
        tl.store(out + n, result.to(out.dtype.element_ty), mask=n < columns)


@tiercel.backends.register(
    op="softmax_online",
    name="new_kernel",
    language="triton",
    description="one row a program, read twice",
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
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    new_kernel_kernel[(rows,)](
        x,
        x if mask is None else mask,
        out,
        columns,
        1.0 if scale is None else scale,
        *x.stride(),
        *(x if mask is None else mask).stride(),
        kind=kind,
        block=min(triton.next_power_of_2(columns), 4096),
    )
    return out
