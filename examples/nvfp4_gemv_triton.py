# SPDX-License-Identifier: Apache-2.0
"""A backend of nvfp4_gemv in Triton: short, and a starting point for faster ones.

    tiercel smoke --op nvfp4_gemv --path examples/nvfp4_gemv_triton.py

A program has some rows and loops over k. It reads the permuted scales, in the layout of newer GPUs:
atoms of 128 rows by 4 groups, 512 bytes each.
"""

import torch
import triton
import triton.language as tl

import tiercel
from tiercel.plugins.types import Fp4Matrix, Fp4Vector, PermutedScales, ProductColumn, RawScales


@triton.jit
def e2m1(codes):
    """The values of codes from 0 to 15."""
    low = codes & 7
    magnitude = tl.where(
        low < 4, low * 0.5, tl.where(low < 6, low - 2.0, tl.where(low == 6, 4.0, 6.0))
    )
    return tl.where(codes >= 8, -magnitude, magnitude)


@triton.jit
def products(
    a, b, scale_a, scale_b, c, rows, k, a_row, a_batch, b_batch, c_row, c_batch, atoms,
    block_rows: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    batch = tl.program_id(1).to(tl.int64)
    real_row = row < rows
    a += batch * a_batch
    b += batch * b_batch
    scale_a += batch * (tl.cdiv(rows, 128) * atoms * 512)
    scale_b += batch * (atoms * 512)
    row_in_scales = row // 128 * atoms * 512 + row % 32 * 16 + row % 128 // 32 * 4

    sums = tl.zeros([block_rows], tl.float32)
    for first in range(0, k, block_k):
        byte = first // 2 + tl.arange(0, block_k // 2)
        group = byte // 8
        place = group // 4 * 512 + group % 4
        real = byte < k // 2
        both = real_row[:, None] & real[None, :]
        packed_a = tl.load(a + row.to(tl.int64)[:, None] * a_row + byte[None, :], both, 0)
        packed_b = tl.load(b + byte, real, 0)
        factor = tl.load(scale_b + place, real, 0.0).to(tl.float32)
        factors = tl.load(scale_a + row_in_scales[:, None] + place[None, :], both, 0.0)
        low = e2m1(packed_a & 15) * e2m1(packed_b & 15)[None, :]
        high = e2m1(packed_a >> 4) * e2m1(packed_b >> 4)[None, :]
        sums += tl.sum((low + high) * factors.to(tl.float32) * factor[None, :], axis=1)
    tl.store(c + batch * c_batch + row.to(tl.int64) * c_row, sums.to(tl.float16), real_row)


@tiercel.backends.register(
    op="nvfp4_gemv", name="triton", description="16 rows a program", language="triton"
)
def gemv(
    a: Fp4Matrix,
    b: Fp4Vector,
    scale_a: RawScales,
    scale_b: RawScales,
    scale_a_permuted: PermutedScales,
    scale_b_permuted: PermutedScales,
    c: ProductColumn,
) -> ProductColumn:
    m, half_k, batches = a.shape
    if a.stride(1) != 1 or b.stride(1) != 1:
        raise NotImplementedError("values along k must be neighbours")
    if m * batches == 0:
        return c
    rows = 16
    products[triton.cdiv(m, rows), batches](
        a.view(torch.uint8),
        b.view(torch.uint8),
        scale_a_permuted,
        scale_b_permuted,
        c,
        m,
        2 * half_k,
        a.stride(0),
        a.stride(2),
        b.stride(2),
        c.stride(0),
        c.stride(2),
        scale_a_permuted.shape[4],
        block_rows=rows,
        block_k=512,
        num_warps=4,
    )
    return c
