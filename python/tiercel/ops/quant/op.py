# SPDX-License-Identifier: Apache-2.0
"""Quantisation to 8-bit and 4-bit floats and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.eager import empty
from tiercel.core.op import Native, Op
from tiercel.core.spec import Call
from tiercel.ops.quant import reference as ref
from tiercel.ops.quant import spec

__all__ = ["fp8_quantize", "nvfp4_dequantize", "nvfp4_quantize"]

_PARTIALS = 1024  # kFp8MaxPartials
_NUMBER = {name: number for number, name in enumerate(spec.TILES)}  # Fp8Granularity


def _two_rows(call: Call) -> dict[str, Any]:
    """Two rows show the strides."""
    names = ("x",) if "x" in call else ("q", "scale")
    return {name: getattr(call, name)[:2] for name in names}


# --------------------------------------------------------------------------------- fp8_quantize


def _fp8_fake(call: Call) -> tuple[Tensor, Tensor]:
    q, scale = _FP8_QUANTIZE.spec.empty(call)
    if torch.compiler.is_exporting() and any(isinstance(n, torch.SymInt) for n in scale.shape):
        # torch would ask whether a rounded quotient is 1, and so bind the exported sizes: such a
        # size becomes a symbol of its own.
        shape = [
            torch.library.get_ctx().new_dynamic_size()
            if isinstance(size, torch.SymInt) and of_one > 1
            else size
            for size, of_one in zip(scale.shape, spec.TILES[call.granularity], strict=True)
        ]
        scale = scale.new_empty(shape)
    return q, scale


# The scale of a whole tensor needs a workspace.
def _partial(x: Tensor, granularity: str) -> Tensor | None:
    return empty(x, (_PARTIALS,), torch.float32) if granularity == "tensor" else None


# Positional arguments: the generic path from a declaration takes longer than the launch.
def _fp8_run(x: Tensor, granularity: str, q: Tensor | None, scale: Tensor | None) -> Any:
    made = None
    if q is None:
        rows, columns = x.shape
        q = empty(x, (rows, columns), torch.float8_e4m3fn)
        scale = empty(x, spec.scale_shape(rows, columns, granularity), torch.float32)
        made = q, scale
    _C.fp8_quantize(x, q, scale, _partial(x, granularity), _NUMBER[granularity])
    return made


def _fp8_plan(x: Tensor, granularity: str, q: Tensor, scale: Tensor) -> dict[str, Any]:
    return dict(_C.fp8_quantize_plan(x, q, scale, _partial(x, granularity), _NUMBER[granularity]))


_FP8_DESCRIPTION = "one pass, values kept in registers while their scale is found"
_FP8_METHOD = "amax, reciprocal, clamp and cast"

_FP8_QUANTIZE = Op(
    spec.FP8_QUANTIZE.without("scale"),
    sm90=Native(
        _fp8_run,
        _fp8_plan,
        ("x", "granularity", "q", "scale"),
        _FP8_DESCRIPTION,
        load=_C.fp8_quantize_load,
        returns=True,
        sample=_two_rows,
    ),
    reference=lambda call: ref.fp8_quantize(call.x, call.granularity),
    method=_FP8_METHOD,
    fake=_fp8_fake,
    plugin=lambda backend, call: backend(call.x, call.granularity, None),
)


def _static_plan(x: Tensor, scale: Tensor, q: Tensor) -> dict[str, Any]:
    partial = empty(x, (_PARTIALS,), torch.float32)
    return dict(_C.fp8_quantize_plan(x, q, scale, partial, _NUMBER["tensor"]))


_FP8_QUANTIZE_STATIC = Op(
    spec.FP8_QUANTIZE_STATIC,
    sm90=Native(
        _C.fp8_quantize_static,
        _static_plan,
        ("x", "scale", "q"),
        _FP8_DESCRIPTION,
        sample=lambda call: {"x": call.x[:2]},
    ),
    reference=lambda call: ref.fp8_quantize(call.x, "tensor", scale=call.scale)[0],
    method=_FP8_METHOD,
    plugin=lambda backend, call: backend(call.x, "tensor", call.scale)[0],
)


@_FP8_QUANTIZE.export
def fp8_quantize(
    x: Tensor,
    granularity: str = "row",
    *,
    scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantises to e4m3: ``q * scale`` approximates ``x``.

    ``scale = max(amax / 448, 2**-126)`` and ``q = e4m3(x * (1 / scale))``: in float32, each
    operation rounded to nearest even, as is the conversion, which saturates at 448. All backends
    give the same bits. A NaN makes its scale and all values that share it NaN; an infinity makes
    its scale infinite, itself NaN and the others 0.

    There is no derivative. Works under torch.compile and torch.export, and in CUDA graphs; it
    never synchronises.

    Args:
        x: ``[T, K]``, float32, bfloat16 or float16; T and K may be 0. The precompiled kernels take
            K that is a multiple of 8 and row strides that are multiples of 16 bytes; ref takes
            others.
        granularity: What shares a scale: ``"tensor"``, ``"row"``, ``"1x128"`` (128 consecutive
            elements of a row, as DeepSeek-V3, arXiv:2412.19437, uses for activations) or
            ``"128x128"`` (a tile, as there for weights). The last group or tile may be smaller.
        scale: A scale ``[1, 1]`` to use instead, float32, on the device of ``x``, with
            ``granularity="tensor"``.
        out: ``(q, scale)`` to write to: contiguous, of the shapes and dtypes below; a given
            ``scale`` must be the same tensor.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``q`` ``[T, K]`` float8_e4m3fn, and ``scale`` float32: ``[1, 1]``, ``[T, 1]``,
        ``[T, ceil(K / 128)]`` or ``[ceil(T / 128), ceil(K / 128)]``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such granularity or
            backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> q, scale = tiercel.fp8_quantize(activations, "1x128")
    """
    if scale is None:
        if out is None:
            return _FP8_QUANTIZE(x, granularity, backend)  # type: ignore[no-any-return]
        return _FP8_QUANTIZE.into()(out, x, granularity, backend)  # type: ignore[no-any-return]
    if out is not None:
        out = _FP8_QUANTIZE.checked_out(out)
    if granularity != "tensor":
        raise ValueError(
            f"fp8_quantize: a given `scale` needs granularity='tensor', got {granularity!r}"
        )
    if out is None:
        return _FP8_QUANTIZE_STATIC(x, scale, backend), scale
    if out[1] is not scale:
        raise ValueError("fp8_quantize: the second of `out` must be the given `scale` itself")
    return _FP8_QUANTIZE_STATIC.into()(out[0], x, scale, backend), scale


# ---------------------------------------------------------------------------------------- nvfp4


_NVFP4_QUANTIZE = Op(
    spec.NVFP4_QUANTIZE,
    sm90=Native(
        _C.nvfp4_quantize,
        _C.nvfp4_quantize_plan,
        ("x", "global_scale", "q", "scale"),
        "a thread a group of 16, rounding by float additions",
        load=_C.nvfp4_quantize_load,
        sample=_two_rows,
    ),
    reference=lambda call: ref.nvfp4_quantize(call.x, global_scale=call.global_scale),
    method="amax, reciprocal, comparisons with the halfway points",
)


@_NVFP4_QUANTIZE.export
def nvfp4_quantize(
    x: Tensor,
    *,
    global_scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantises to NVFP4: each 16 consecutive elements of a row become 16 e2m1 values and an e4m3
    scale.

    ``scale = e4m3(min(amax / 6 / global_scale, 448))`` and
    ``q = e2m1(x * (1 / (scale * global_scale)))``: in float32, each operation rounded to nearest
    even, as are the two conversions; e2m1 saturates at 6. All backends give the same bits. A group
    whose scale is rounded to 0 becomes zeros, one with a NaN gets the scale NaN, one with an
    infinity the scale 448. Signs are kept, also of zeros.

    There is no derivative. Works under torch.compile and torch.export, and in CUDA graphs; it
    never synchronises.

    Args:
        x: ``[T, K]``, float32, bfloat16 or float16, K a multiple of 16; T and K may be 0. The
            precompiled kernels take row strides that are multiples of 16 bytes; ref takes others.
        global_scale: ``[1]`` float32, on the device of ``x``; None is 1. Use the largest magnitude
            of ``x`` divided by ``448 * 6`` for the full range of the scales.
        out: ``(q, scale)`` to write to: contiguous, of the shapes and dtypes below.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``q`` ``[T, K / 2]`` float4_e2m1fn_x2: two values per byte, the first in its low half; and
        ``scale`` ``[T, K / 16]`` float8_e4m3fn.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> q, scale = tiercel.nvfp4_quantize(weight)
    """
    if out is None:
        return _NVFP4_QUANTIZE(x, global_scale, backend)  # type: ignore[no-any-return]
    return _NVFP4_QUANTIZE.into()(out, x, global_scale, backend)  # type: ignore[no-any-return]


_NVFP4_DEQUANTIZE = Op(
    spec.NVFP4_DEQUANTIZE,
    sm90=Native(
        _C.nvfp4_dequantize,
        _C.nvfp4_dequantize_plan,
        ("q", "scale", "global_scale", "out"),
        "a thread half a group, decoding by shifts",
        load=_C.nvfp4_dequantize_load,
        sample=_two_rows,
    ),
    reference=lambda call: ref.nvfp4_dequantize(
        call.q, call.scale, global_scale=call.global_scale, dtype=call.dtype
    ),
    method="a look-up and a product",
)


@_NVFP4_DEQUANTIZE.export
def nvfp4_dequantize(
    q: Tensor,
    scale: Tensor,
    *,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Dequantises NVFP4: ``q * (scale * global_scale)``, rounded to ``dtype``.

    Both products are float32, each rounded to nearest even; without a global scale they are exact.
    All backends give the same bits.

    There is no derivative. Works under torch.compile and torch.export, and in CUDA graphs; it
    never synchronises.

    Args:
        q: ``[T, K / 2]`` float4_e2m1fn_x2, contiguous: two values per byte, the first in its low
            half. K is a multiple of 16.
        scale: ``[T, K / 16]`` float8_e4m3fn, contiguous, on the device of ``q``.
        global_scale: ``[1]`` float32, on the device of ``q``; None is 1.
        dtype: ``torch.bfloat16``, ``torch.float16`` or ``torch.float32``.
        out: ``[T, K]`` to write to, contiguous, of one of these dtypes; ``dtype`` is then ignored.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[T, K]`` of ``dtype``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> weight = tiercel.nvfp4_dequantize(q, scale)
    """
    if out is None:
        return _NVFP4_DEQUANTIZE(q, scale, global_scale, dtype, backend)  # type: ignore[no-any-return]
    return _NVFP4_DEQUANTIZE.into()(  # type: ignore[no-any-return]
        out, q, scale, global_scale, dtype, backend
    )
