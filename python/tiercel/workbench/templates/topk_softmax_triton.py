# SPDX-License-Identifier: Apache-2.0
"""new_kernel: topk_softmax in Triton.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tiercel
from tiercel.plugins.types import Indices, Scores, Weights


@triton.jit
def new_kernel_kernel(
    scores,
    weights,
    indices,
    row_stride,
    column_stride,
    experts,
    k: tl.constexpr,
    padded: tl.constexpr,  # experts, rounded up to a power of 2
    all_scores: tl.constexpr,  # the denominator is over the whole row
):
    """One row a program: k times, take the largest score that is left."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded)
    inside = columns < experts
    place = scores + row * row_stride + columns * column_stride
    row_scores = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
    # An order on integers: NaN above everything, 0.0 equal to -0.0, columns beyond the row last.
    bits = (row_scores + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(row_scores == 0.0, 0, order)
    order = tl.where(row_scores != row_scores, 0x7FFFFFFF, order)
    # The larger score first, then the smaller index: no two keys are equal.
    keys = (order.to(tl.int64) << 32) | (0x7FFFFFFF - columns).to(tl.int64)
    keys = tl.where(inside, keys, -0x7FFFFFFFFFFFFFFF)

    # As torch.softmax: NaN where the row's largest is NaN or infinite.
    top = tl.max(keys, axis=0)
    largest = tl.sum(tl.where(keys == top, row_scores, 0.0), axis=0)
    exponentials = tl.exp(row_scores - largest)
    total = tl.sum(tl.where(inside, exponentials, 0.0), axis=0)
    if not all_scores:
        total = 0.0
        left = keys
        for _ in tl.static_range(k):
            best = tl.max(left, axis=0)
            total += tl.sum(tl.where(keys == best, exponentials, 0.0), axis=0)
            left = tl.where(left == best, -0x7FFFFFFFFFFFFFFF, left)
    for i in tl.static_range(k):
        best = tl.max(keys, axis=0)
        chosen = keys == best
        weight = tl.sum(tl.where(chosen, exponentials, 0.0), axis=0) / total
        index = tl.sum(tl.where(chosen, columns, 0), axis=0)
        tl.store(weights + row * k + i, weight)
        tl.store(indices + row * k + i, index)
        keys = tl.where(chosen, -0x7FFFFFFFFFFFFFFF, keys)


@tiercel.backends.register(
    op="topk_softmax",
    name="new_kernel",
    language="triton",
    description="one row a program, k rounds of a maximum",
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
    new_kernel_kernel[(rows,)](
        scores,
        weights,
        indices,
        scores.stride(0),
        scores.stride(1),
        experts,
        k,
        padded=triton.next_power_of_2(experts),
        all_scores=softmax_first and not renormalize,
        num_warps=1 if experts <= 256 else 4,
    )
    return weights, indices
