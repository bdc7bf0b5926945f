# SPDX-License-Identifier: Apache-2.0
"""new_kernel: linear_act in the CuTe DSL, compiled at the first call.

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
from tiercel.plugins.types import Activated, Bias, Features, Weight

THREADS = 128
DTYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}
TENSORS = ("x", "weight", "bias", "out")
# Sizes, and strides in elements; then what only the grid needs.
SCALARS = ("m", "n", "k", "x_row", "x_step", "w_row", "w_step", "bias_step", "blocks")


def _sigmoid(x):
    return 1.0 / (1.0 + cute.math.exp(-x))


ACTIVATIONS = {
    "none": lambda x: x,
    "relu": lambda x: cute.arch.fmax(x, 0.0, nan=True),
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1.0 + cute.math.erf(x * 0.5**0.5)),
    "gelu_tanh": lambda x: x * _sigmoid(1.5957691216 * (x + 0.044715 * x * x * x)),
}


class Kernel:
    """One thread an element of the output."""

    def __init__(self, dtype: type, activation: str) -> None:
        self.dtype = dtype
        self.activation = activation

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        weight: cute.Pointer,
        bias: cute.Pointer,
        out: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        x_row: Int32,
        x_step: Int32,
        w_row: Int32,
        w_step: Int32,
        bias_step: Int32,
        blocks: Int32,
        stream,
    ):
        self.kernel(x, weight, bias, out, m, n, k, x_row, x_step, w_row, w_step, bias_step).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        weight: cute.Pointer,
        bias: cute.Pointer,
        out: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        x_row: Int32,
        x_step: Int32,
        w_row: Int32,
        w_step: Int32,
        bias_step: Int32,
    ):
        element = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if element < m * n:
            row = element // n
            column = element - row * n
            total = Float32(0.0)
            for i in cutlass.range(k, unroll=4):
                a = (x + row * x_row + i * x_step).load().to(Float32)
                b = (weight + column * w_row + i * w_step).load().to(Float32)
                total = total + a * b
            if bias.toint() != 0:
                total = total + (bias + column * bias_step).load().to(Float32)
            (out + element).store(ACTIVATIONS[self.activation](total).to(self.dtype))


@functools.cache
def compiled(dtype: torch.dtype, activation: str):
    element = DTYPES[dtype]
    pointers = tuple(Pointer(name, element, align=2) for name in TENSORS)
    scalars = tuple(Scalar(name) for name in SCALARS)
    launch = Launch(
        parameters=(*pointers, *scalars[:-1]),
        grid=("blocks", 1, 1),
        block=(THREADS, 1, 1),
        smem=0,
    )
    name = f"new_kernel_{activation}_{element.__name__}"
    kernel = Kernel(element, activation)
    declared = Function(name, kernel, (*pointers, *scalars), (launch,), (), ())
    return tiercel.jit.cute(declared)


@tiercel.backends.register(
    op="linear_act",
    name="new_kernel",
    language="cute",
    description="one thread an element",
)
def new_kernel(
    x: Features,  # [M, K] bfloat16 or float16, any strides
    weight: Weight,  # [N, K], the same dtype
    bias: Bias,  # [N] or None
    activation: str,  # none, relu, silu, gelu or gelu_tanh
) -> Activated:  # [M, N], the dtype of x
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    compiled(x.dtype, activation)(
        x=x,
        weight=weight,
        bias=bias,
        out=out,
        m=m,
        n=n,
        k=k,
        x_row=x.stride(0),
        x_step=x.stride(1),
        w_row=weight.stride(0),
        w_step=weight.stride(1),
        bias_step=0 if bias is None else bias.stride(0),
        blocks=(m * n + THREADS - 1) // THREADS,
    )
    return out
