# SPDX-License-Identifier: Apache-2.0
"""new_kernel: linear_act in Triton.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tiercel
from tiercel.plugins.types import Activated, Bias, Features, Weight

ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh")


@triton.jit
def new_kernel_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    columns,
    depth,
    x_row,
    x_column,
    weight_row,
    weight_column,
    bias_stride,
    activation: tl.constexpr,  # index in ACTIVATIONS
    has_bias: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
):
    """One tile of the output a program."""
    m = (tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)
    n = (tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)).to(tl.int64)
    k = tl.arange(0, tile_depth)
    sums = tl.zeros((tile_rows, tile_columns), dtype=tl.float32)
    for start in range(0, depth, tile_depth):
        d = (start + k).to(tl.int64)
        x_at = x + m[:, None] * x_row + d[None, :] * x_column
        x_tile = tl.load(x_at, mask=(m[:, None] < rows) & (d[None, :] < depth), other=0.0)
        w_at = weight + n[None, :] * weight_row + d[:, None] * weight_column
        w_tile = tl.load(w_at, mask=(n[None, :] < columns) & (d[:, None] < depth), other=0.0)
        sums = tl.dot(x_tile, w_tile, sums)
    if has_bias:
        sums += tl.load(bias + n * bias_stride, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    if activation == 1:
        sums = tl.maximum(sums, 0.0)
    elif activation == 2:
        sums = sums * tl.sigmoid(sums)
    elif activation == 3:
        sums = 0.5 * sums * (1.0 + tl.erf(sums * 0.7071067811865476))
    elif activation == 4:  # tanh(y) = 2 sigmoid(2 y) - 1
        inner = 0.7978845608028654 * (sums + 0.044715 * sums * sums * sums)
        sums = sums * tl.sigmoid(2.0 * inner)
    out_at = out + m[:, None] * columns + n[None, :]
    inside = (m[:, None] < rows) & (n[None, :] < columns)
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=inside)


@tiercel.backends.register(
    op="linear_act",
    name="new_kernel",
    language="triton",
    description="tiles of 64 x 64, sums in float32, rounded once",
)
def new_kernel(
    x: Features,  # [M, K] bfloat16 or float16, any strides
    weight: Weight,  # [N, K], the same dtype
    bias: Bias,  # [N] or None
    activation: str,  # one of ACTIVATIONS
) -> Activated:  # [M, N], the dtype of x
    rows, depth = x.shape
    columns = weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    tile = 64
    new_kernel_kernel[(triton.cdiv(rows, tile), triton.cdiv(columns, tile))](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        columns,
        depth,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        weight.stride(1),
        0 if bias is None else bias.stride(0),
        activation=ACTIVATIONS.index(activation),
        has_bias=bias is not None,
        tile_rows=tile,
        tile_columns=tile,
        tile_depth=tile,
    )
    return out
