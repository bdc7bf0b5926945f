# SPDX-License-Identifier: Apache-2.0
"""new_kernel: rms_norm in the CuTe DSL, compiled at the first call.

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
from tiercel.plugins.types import (
    Normalised,
    NormBias,
    NormWeight,
    Residual,
    ResidualSum,
    Rows,
)

WARPS = 4
DTYPES = {
    torch.float32: cutlass.Float32,
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
}
TENSORS = ("x", "weight", "bias", "residual", "out", "residual_out")
# Sizes, and strides in elements; then what only the grid needs.
SCALARS = ("rows", "columns", "x_row", "x_step", "residual_row", "residual_step", "blocks")


class Kernel:
    """One warp a row, which is read twice: the sum of squares, then the results."""

    def __init__(self, dtype: type) -> None:
        self.dtype = dtype

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        weight: cute.Pointer,
        bias: cute.Pointer,
        residual: cute.Pointer,
        out: cute.Pointer,
        residual_out: cute.Pointer,
        eps: Float32,
        rows: Int32,
        columns: Int32,
        x_row: Int32,
        x_step: Int32,
        residual_row: Int32,
        residual_step: Int32,
        blocks: Int32,
        stream,
    ):
        tensors = (x, weight, bias, residual, out, residual_out)
        sizes = (rows, columns, x_row, x_step, residual_row, residual_step)
        self.kernel(*tensors, eps, *sizes).launch(
            grid=(blocks, 1, 1), block=(32 * WARPS, 1, 1), stream=stream
        )

    @cute.jit
    def value(self, x, x_step, residual, residual_step, i):
        """x, or x + residual as it is stored: rounded to their dtype."""
        value = (x + i * x_step).load().to(Float32)
        if residual.toint() != 0:
            added = value + (residual + i * residual_step).load().to(Float32)
            value = added.to(self.dtype).to(Float32)
        return value

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        weight: cute.Pointer,
        bias: cute.Pointer,
        residual: cute.Pointer,
        out: cute.Pointer,
        residual_out: cute.Pointer,
        eps: Float32,
        rows: Int32,
        columns: Int32,
        x_row: Int32,
        x_step: Int32,
        residual_row: Int32,
        residual_step: Int32,
    ):
        thread = cute.arch.thread_idx()[0]
        lane = thread % 32
        row = cute.arch.block_idx()[0] * WARPS + thread // 32
        if row < rows:
            x_at, other_at = x + row * x_row, residual + row * residual_row
            squares = Float32(0.0)
            for i in cutlass.range(lane, columns, 32):
                value = self.value(x_at, x_step, other_at, residual_step, i)
                squares = squares + value * value
            mean = cute.arch.warp_reduction_sum(squares) / columns.to(Float32)
            scale = cute.math.rsqrt(mean + eps)
            for i in cutlass.range(lane, columns, 32):
                value = self.value(x_at, x_step, other_at, residual_step, i)
                if residual.toint() != 0:
                    (residual_out + row * columns + i).store(value.to(self.dtype))
                result = value * scale
                if weight.toint() != 0:
                    result = result * (weight + i).load().to(Float32)
                if bias.toint() != 0:
                    result = result + (bias + i).load().to(Float32)
                (out + row * columns + i).store(result.to(self.dtype))


@functools.cache
def compiled(dtypes: tuple[torch.dtype, ...]):
    """For the dtypes of x, weight and bias."""
    dtype, weight, bias = (DTYPES[one] for one in dtypes)
    kinds = dict.fromkeys(TENSORS, dtype) | {"weight": weight, "bias": bias}
    pointers = tuple(Pointer(name, kind, align=2) for name, kind in kinds.items())
    eps, scalars = Scalar("eps", floating=True), tuple(Scalar(name) for name in SCALARS)
    launch = Launch(
        parameters=(*pointers, eps, *scalars[:-1]),
        grid=("blocks", 1, 1),
        block=(32 * WARPS, 1, 1),
        smem=0,
    )
    name = "_".join(("new_kernel", *(one.__name__ for one in (dtype, weight, bias))))
    declared = Function(name, Kernel(dtype), (*pointers, eps, *scalars), (launch,), (), ())
    return tiercel.jit.cute(declared)


@tiercel.backends.register(
    op="rms_norm",
    name="new_kernel",
    language="cute",
    description="one warp a row, read twice",
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
    residual_out = None if residual is None else torch.empty_like(out)
    if out.numel() > 0:
        dtypes = (x.dtype if tensor is None else tensor.dtype for tensor in (x, weight, bias))
        residual_row, residual_step = (0, 0) if residual is None else residual.stride()
        compiled(tuple(dtypes))(
            x=x,
            weight=weight,
            bias=bias,
            residual=residual,
            out=out,
            residual_out=residual_out,
            eps=eps,
            rows=rows,
            columns=columns,
            x_row=x.stride(0),
            x_step=x.stride(1),
            residual_row=residual_row,
            residual_step=residual_step,
            blocks=(rows + WARPS - 1) // WARPS,
        )
    return out if residual_out is None else (out, residual_out)
