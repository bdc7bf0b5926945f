# SPDX-License-Identifier: Apache-2.0
"""Linear layers of float8 operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.op import Lookup, Native, Op
from tiercel.core.spec import Call
from tiercel.ops.linear import reference as ref
from tiercel.ops.linear.contract import call_fp8_backend, flat_scales
from tiercel.ops.linear.kernels import INDEX, as_matrix, two_rows
from tiercel.ops.linear.spec import FP8_LINEAR
from tiercel.ops.quant.op import fp8_quantize

__all__ = ["fp8_linear"]


def _launch(native: Callable[..., Any], call: Call) -> Any:
    call = flat_scales(call)
    call.x, call.out = as_matrix(call.x), as_matrix(call.out)
    return _FP8_LINEAR.launch(native, call)


def _two_rows(call: Call) -> dict[str, Any]:
    x_scale = flat_scales(call).x_scale
    return {**two_rows(call), "x_scale": x_scale if x_scale.numel() == 1 else x_scale[:2]}


def _reference(call: Call) -> Tensor:
    return ref.fp8_linear(
        call.x,
        call.weight,
        call.x_scale,
        call.weight_scale,
        call.bias,
        activation=call.activation,
    )


_FP8_LINEAR = Op(
    FP8_LINEAR,
    sm90=Native(
        _C.fp8_linear,
        _C.fp8_linear_plan,
        (*FP8_LINEAR.names[:5], "out", Lookup("activation", INDEX)),
        "TMA and wgmma; scales of rows in the epilogue, of blocks after each 128 of K",
        "cute",
        load=_C.linear_act_load,
        contiguous=("x_scale", "weight_scale"),
        ranks={"x": 2},
        launch=_launch,
        sample=_two_rows,
    ),
    reference=_reference,
    method="float32 products of the float8 values",
    plugin=call_fp8_backend,
)


def quantized_blocks(
    op: str, x: Tensor, x_scale: Tensor | None, backend: str | None
) -> tuple[Tensor, Tensor | None]:
    """float8 rows and their scales per 1x128 values, of those or of 16-bit ones."""
    if x_scale is not None or not isinstance(x, Tensor):
        return x, x_scale
    if x.dtype not in (torch.bfloat16, torch.float16):
        return x, x_scale
    if x.dim() == 0:
        raise ValueError(f"{op}: `x` must have at least 1 dimension, got 0")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    values, scale = fp8_quantize(rows, "1x128", backend=backend)
    return values.view(x.shape), scale


@_FP8_LINEAR.export
def fp8_linear(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor | None,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """A linear layer of float8 operands: ``act(x_scale * (x @ weight.T) * weight_scale + bias)``.

    The tensor cores accumulate products with about 13 fraction bits: at K = 4096 the error is about
    that of rounding to bfloat16. With block scales they accumulate only 128 of K, which are then
    scaled and added to float32 sums. Scales, bias and activation are float32, and the result is
    rounded once. There is no gradient. Works under torch.compile and torch.export, and in CUDA
    graphs; it never synchronises.

    Args:
        x: ``[..., K]``, float8_e4m3fn, as :func:`tiercel.fp8_quantize` makes it. Without
            ``x_scale`` bfloat16 or float16, which that function quantises first ("1x128").
        weight: ``[N, K]``, float8_e4m3fn, on the device of ``x``. The precompiled kernels take K
            that is a multiple of 16 and N that is a multiple of 8; ref takes others.
        x_scale: Factor of ``x``, float32: one element or one per row, in any shape; or one per 128
            elements of a row, ``[..., ceil(K / 128)]`` with any strides. None: ``x`` is quantised
            first.
        weight_scale: Factor of ``weight``, float32: one element or one per row, in any shape; or
            one per 128x128 block, ``[ceil(N / 128), ceil(K / 128)]``, if ``x_scale`` has one per
            128 elements of a row.
        bias: ``[N]``, bfloat16, or None.
        activation: ``"none"``, ``"silu"``, ``"gelu"`` (by the error function) or ``"gelu_tanh"``.
        out: ``[..., N]`` to write to, contiguous, bfloat16.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[..., N]``, bfloat16.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such activation or
            backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> x8, x_scale = tiercel.fp8_quantize(x, "row")
        >>> y = tiercel.fp8_linear(x8, w8, x_scale, w_scale)
    """
    x, x_scale = quantized_blocks("fp8_linear", x, x_scale, backend)
    arguments = (x, weight, x_scale, weight_scale, bias, activation, backend)
    if out is None:
        result: Tensor = _FP8_LINEAR.pick()(*arguments)
        return result
    return _FP8_LINEAR.into()(out, *arguments)  # type: ignore[no-any-return]
