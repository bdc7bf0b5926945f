# SPDX-License-Identifier: Apache-2.0
"""new_kernel: nvfp4_gemv in the CuTe DSL, compiled at the first call.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

import functools
import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # before the DSL is imported

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

import tiercel
from tiercel.jit.dsl.declaration import Function, Launch, Pointer, Scalar
from tiercel.plugins.types import Fp4Matrix, Fp4Vector, PermutedScales, ProductColumn, RawScales

WARPS = 8
BYTES = ("a", "b", "scale_a", "scale_b")
# Sizes, and strides in elements; then what only the grid needs.
SCALARS = ("rows", "row_bytes", "atoms", "a_row", "a_byte", "a_batch", "b_byte", "b_batch")
SCALARS += ("scale_a_batch", "scale_b_batch", "c_row", "c_batch", "blocks", "batches")


def _value(code):
    """The e2m1 value of 4 bits: a sign, two bits of exponent and one of mantissa."""
    exponent, mantissa = code >> 1 & 3, (code & 1).to(Float32)
    normal = (2.0 + mantissa) * (Int32(1) << exponent).to(Float32) * 0.25
    size = cutlass.select_(exponent == 0, 0.5 * mantissa, normal)
    return cutlass.select_((code & 8) != 0, -size, size)


def _scale(code):
    """The e4m3 value of 8 bits: a sign, four bits of exponent and three of mantissa."""
    exponent, mantissa = code >> 3 & 15, (code & 7).to(Float32)
    normal = (8.0 + mantissa) * (Int32(1) << exponent).to(Float32) * 2.0**-10
    size = cutlass.select_(exponent == 0, mantissa * 2.0**-9, normal)
    return cutlass.select_((code & 128) != 0, -size, size)


class Kernel:
    """One warp a row of one batch; a byte's low half comes first."""

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        scale_a: cute.Pointer,
        scale_b: cute.Pointer,
        c: cute.Pointer,
        rows: Int32,
        row_bytes: Int32,
        atoms: Int32,
        a_row: Int32,
        a_byte: Int32,
        a_batch: Int32,
        b_byte: Int32,
        b_batch: Int32,
        scale_a_batch: Int32,
        scale_b_batch: Int32,
        c_row: Int32,
        c_batch: Int32,
        blocks: Int32,
        batches: Int32,
        stream,
    ):
        strides = (a_row, a_byte, a_batch, b_byte, b_batch, scale_a_batch, scale_b_batch)
        self.kernel(
            a, b, scale_a, scale_b, c, rows, row_bytes, atoms, *strides, c_row, c_batch
        ).launch(grid=(blocks, batches, 1), block=(32 * WARPS, 1, 1), stream=stream)

    @cute.jit
    def scale_of(self, scales, row, group, atoms):
        """The scale of a row's group of 16 values; atoms of 128 rows and 4 groups lie along k."""
        atom = row // 128 * atoms + group // 4
        place = atom * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4
        return _scale((scales + place).load().to(Int32))

    @cute.kernel
    def kernel(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        scale_a: cute.Pointer,
        scale_b: cute.Pointer,
        c: cute.Pointer,
        rows: Int32,
        row_bytes: Int32,
        atoms: Int32,
        a_row: Int32,
        a_byte: Int32,
        a_batch: Int32,
        b_byte: Int32,
        b_batch: Int32,
        scale_a_batch: Int32,
        scale_b_batch: Int32,
        c_row: Int32,
        c_batch: Int32,
    ):
        thread, batch = cute.arch.thread_idx()[0], cute.arch.block_idx()[1]
        row = cute.arch.block_idx()[0] * WARPS + thread // 32
        if row < rows:
            a_at, b_at = a + row * a_row + batch * a_batch, b + batch * b_batch
            scales, others = scale_a + batch * scale_a_batch, scale_b + batch * scale_b_batch
            total = Float32(0.0)
            for k in cutlass.range(thread % 32, row_bytes, 32):
                one = (a_at + k * a_byte).load().to(Int32)
                other = (b_at + k * b_byte).load().to(Int32)
                product = _value(one & 15) * _value(other & 15)
                product = product + _value(one >> 4) * _value(other >> 4)
                scale = self.scale_of(scales, row, k // 8, atoms)
                total = total + product * scale * self.scale_of(others, Int32(0), k // 8, atoms)
            total = cute.arch.warp_reduction_sum(total)
            if thread % 32 == 0:
                (c + row * c_row + batch * c_batch).store(total.to(cutlass.Float16))


@functools.cache
def compiled():
    pointers = tuple(Pointer(name, cutlass.Uint8, align=1) for name in BYTES)
    pointers += (Pointer("c", cutlass.Float16, align=2),)
    scalars = tuple(Scalar(name) for name in SCALARS)
    launch = Launch(
        parameters=(*pointers, *scalars[:-2]),
        grid=("blocks", "batches", 1),
        block=(32 * WARPS, 1, 1),
        smem=0,
    )
    declared = Function("new_kernel", Kernel(), (*pointers, *scalars), (launch,), (), ())
    return tiercel.jit.cute(declared)


@tiercel.backends.register(
    op="nvfp4_gemv",
    name="new_kernel",
    language="cute",
    description="one warp a row, sums in float32",
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
    compiled()(
        a=a.view(torch.uint8),
        b=b.view(torch.uint8),
        scale_a=scale_a_permuted.view(torch.uint8),
        scale_b=scale_b_permuted.view(torch.uint8),
        c=c,
        rows=rows,
        row_bytes=in_bytes,
        atoms=scale_a_permuted.shape[4],
        a_row=a.stride(0),
        a_byte=a.stride(1),
        a_batch=a.stride(2),
        b_byte=b.stride(1),
        b_batch=b.stride(2),
        scale_a_batch=scale_a_permuted.stride(5),
        scale_b_batch=scale_b_permuted.stride(5),
        c_row=c.stride(0),
        c_batch=c.stride(2),
        blocks=(rows + WARPS - 1) // WARPS,
        batches=batches,
    )
    return c
