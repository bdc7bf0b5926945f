# SPDX-License-Identifier: Apache-2.0
"""new_kernel: nvfp4_gemv in Triton.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tiercel
from tiercel.plugins.types import Fp4Matrix, Fp4Vector, PermutedScales, ProductColumn, RawScales


@triton.jit
def value_of(code):
    """The e2m1 value of 4 bits: a sign, two bits of exponent and one of mantissa."""
    exponent = (code >> 1) & 3
    mantissa = (code & 1).to(tl.float32)
    power = (1 << exponent).to(tl.float32) * 0.5
    size = tl.where(exponent == 0, 0.5 * mantissa, (1.0 + 0.5 * mantissa) * power)
    return tl.where(code >= 8, -size, size)


@triton.jit
def product_of(one, other):
    """The sum of two bytes' two products; a byte's low half comes first."""
    low = value_of(one & 15) * value_of(other & 15)
    return low + value_of(one >> 4) * value_of(other >> 4)


@triton.jit
def load_scale(scales, row, group, atoms, inside):
    """The place of a scale, by row and group of 16; atoms of 128 rows, 4 groups lie along k."""
    atom = (row // 128) * atoms + group // 4
    place = (row % 32) * 16 + (row % 128) // 32 * 4 + group % 4
    scale = tl.load(scales + atom * 512 + place, mask=inside).to(tl.float32)
    return tl.where(inside, scale, 0.0)


@triton.jit
def new_kernel_kernel(
    a,
    b,
    scale_a,
    scale_b,
    c,
    rows,
    in_bytes,
    atoms,
    a_row,
    a_byte,
    a_batch,
    b_byte,
    b_batch,
    scale_a_batch,
    scale_b_batch,
    c_row,
    c_batch,
    tile_rows: tl.constexpr,
    tile_bytes: tl.constexpr,
):
    """A few rows of one batch a program."""
    m = (tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)[:, None]
    batch = tl.program_id(1).to(tl.int64)
    a += batch * a_batch
    b += batch * b_batch
    scale_a += batch * scale_a_batch
    scale_b += batch * scale_b_batch
    sums = tl.zeros((tile_rows, tile_bytes), dtype=tl.float32)
    for start in range(0, in_bytes, tile_bytes):
        k = (start + tl.arange(0, tile_bytes)).to(tl.int64)[None, :]
        within = k < in_bytes
        inside = (m < rows) & within
        one = tl.load(a + m * a_row + k * a_byte, mask=inside, other=0).to(tl.int32)
        other = tl.load(b + k * b_byte, mask=within, other=0).to(tl.int32)
        scale = load_scale(scale_a, m, k // 8, atoms, inside)
        scale *= load_scale(scale_b, 0 * k, k // 8, atoms, within)
        sums += product_of(one, other) * scale
    result = tl.sum(sums, axis=1)[:, None].to(c.dtype.element_ty)
    tl.store(c + m * c_row + batch * c_batch, result, mask=m < rows)


@tiercel.backends.register(
    op="nvfp4_gemv",
    name="new_kernel",
    language="triton",
    description="a few rows a program, sums in float32",
)
def new_kernel(
    a: Fp4Matrix,  # [m, k / 2, l] of two values each, any strides
    b: Fp4Vector,  # [1, k / 2, l]
    scale_a: RawScales,  # [m, k / 16, l] on the CPU; the same as the permuted ones
    scale_b: RawScales,  # [1, k / 16, l] on the CPU
    scale_a_permuted: PermutedScales,  # [32, 4, m / 128, 4, k / 64, l], of that layout's strides
    scale_b_permuted: PermutedScales,  # [32, 4, 1, 4, k / 64, l]
    c: ProductColumn,  # [m, 1, l] float16, any strides, written
) -> ProductColumn:
    rows, in_bytes, batches = a.shape
    if c.numel() == 0:
        return c
    tile_rows = 4
    new_kernel_kernel[(triton.cdiv(rows, tile_rows), batches)](
        a.view(torch.uint8),
        b.view(torch.uint8),
        scale_a_permuted,
        scale_b_permuted,
        c,
        rows,
        in_bytes,
        scale_a_permuted.shape[4],
        *a.stride(),
        *b.stride()[1:],
        scale_a_permuted.stride(5),
        scale_b_permuted.stride(5),
        c.stride(0),
        c.stride(2),
        tile_rows=tile_rows,
        tile_bytes=512,
    )
    return c
