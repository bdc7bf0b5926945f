# SPDX-License-Identifier: Apache-2.0
"""To 8-bit and 4-bit floats and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._op import Backend, Op
from tiercel.core.eager import empty
from tiercel.core.platform import Reason
from tiercel.ops.quant import nvfp4
from tiercel.ops.quant import reference as ref
from tiercel.ops.quant.checks import E4M3, check_narrow, check_values, reason_of

__all__ = ["fp8_quantize", "nvfp4_dequantize", "nvfp4_quantize"]

_INDEX = {name: index for index, name in enumerate(ref.GRANULARITIES)}  # Fp8Granularity
_PARTIALS = 1024  # kFp8MaxPartials


_FP8 = "fp8_quantize"
_SHAPES = {
    "tensor": "[1, 1]",
    "row": "[T, 1]",
    "1x128": "[T, K / 128]",
    "128x128": "[T / 128, K / 128]",
}


def _check_granularity(granularity: object) -> None:
    if not isinstance(granularity, str) or granularity not in _INDEX:
        known = ", ".join(map(repr, _INDEX))
        raise ValueError(f"{_FP8}: `granularity` must be one of {known}, got {granularity!r}")


def _check_fp8(x: Tensor, granularity: str, backend: Any = None) -> None:
    _check_granularity(granularity)
    check_values(_FP8, "x", x)


def _check_fp8_out(x: Tensor, q: Tensor, scale: Tensor, granularity: str, _: Any = None) -> None:
    _check_fp8(x, granularity)
    check_narrow(_FP8, "q", q, E4M3, x.shape, "[T, K]", ("x", x))
    shape, why = ref.scale_shape(x, granularity), _SHAPES[granularity]
    check_narrow(_FP8, "scale", scale, torch.float32, shape, why, ("x", x))


def _check_fp8_static(x: Tensor, scale: Tensor, *rest: Any) -> None:
    _check_fp8(x, "tensor")
    check_narrow(_FP8, "scale", scale, torch.float32, (1, 1), "[1, 1]", ("x", x))
    if len(rest) == 2:
        check_narrow(_FP8, "q", rest[0], E4M3, x.shape, "[T, K]", ("x", x))


def _fp8_fake(x: Tensor, granularity: str, backend: Any = None) -> tuple[Tensor, Tensor]:
    q, scale = _fp8_outputs(x, granularity)
    if torch.compiler.is_exporting() and any(isinstance(n, torch.SymInt) for n in scale.shape):
        # torch would ask whether a rounded quotient is 1, and so bind the exported sizes: such a
        # size becomes a symbol of its own.
        tile = ref.GRANULARITIES[granularity]
        shape = [
            torch.library.get_ctx().new_dynamic_size()
            if isinstance(size, torch.SymInt) and of_one > 1
            else size
            for size, of_one in zip(scale.shape, tile, strict=True)
        ]
        scale = scale.new_empty(shape)
    return q, scale


def _fp8_outputs(x: Tensor, granularity: str, backend: Any = None) -> tuple[Tensor, Tensor]:
    scale = empty(x, tuple(ref.scale_shape(x, granularity)), torch.float32)
    return empty(x, tuple(x.shape), E4M3), scale


def _fp8_sm90_out(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    granularity: str,
    backend: Any,
    *,
    launch: Any = _C.fp8_quantize,
) -> Any:
    partial = None
    if granularity == "tensor":
        partial = empty(x, (_PARTIALS,), torch.float32)
    return launch(x, q, scale, partial, _INDEX.get(granularity, -1))


def _fp8_sm90(x: Tensor, granularity: str, backend: Any) -> tuple[Tensor, Tensor]:
    q, scale = _fp8_outputs(x, granularity)
    _fp8_sm90_out(x, q, scale, granularity, None)
    return q, scale


def fp8_between(
    x: Tensor,
    made: tuple[Tensor, Tensor],
    granularity: str,
    older: bool,
    next_: bool,
    counters: Tensor | None = None,
) -> None:
    """Of rows or groups, overlapping with the launches before and after it: see fp8_quantize.h."""
    _C.fp8_quantize_between(x, *made, counters, _INDEX[granularity], older, next_)


def _fp8_static_sm90(x: Tensor, scale: Tensor, backend: Any) -> Tensor:
    q: Tensor = empty(x, tuple(x.shape), E4M3)
    _C.fp8_quantize_static(x, scale, q)
    return q


def _fp8_plan(x: Tensor, granularity: str, backend: Any = None) -> dict[str, Any]:
    q, scale = _fp8_outputs(x, granularity)
    return dict(_fp8_sm90_out(x, q, scale, granularity, None, launch=_C.fp8_quantize_plan))


def _fp8_why_not(x: Tensor, granularity: str) -> Reason | None:
    return reason_of(_fp8_plan, x[:2], granularity)  # two rows show the stride


def _fp8_ref(x: Tensor, granularity: str, backend: Any = None) -> tuple[Tensor, Tensor]:
    return ref.fp8_quantize(x, granularity)


def _fp8_ref_out(x: Tensor, q: Tensor, scale: Tensor, granularity: str, backend: Any) -> None:
    for out, result in zip((q, scale), ref.fp8_quantize(x, granularity), strict=True):
        out.copy_(result)


def _fp8_static_ref(x: Tensor, scale: Tensor, backend: Any = None) -> Tensor:
    return ref.fp8_quantize(x, "tensor", scale=scale)[0]


def _fp8_static_ref_out(x: Tensor, scale: Tensor, q: Tensor, backend: Any = None) -> None:
    q.copy_(_fp8_static_ref(x, scale))


_FP8_CUDA = ("one pass, values kept in registers while their scale is found", "cuda")
_FP8_TORCH = ("amax, reciprocal, clamp and cast", "torch")

_FP8_QUANTIZE = Op(
    _FP8,
    "(Tensor x, str granularity='row', str? backend=None) -> (Tensor q, Tensor scale)",
    check=_check_fp8,
    fake=_fp8_fake,
    sm90=Backend("sm90", _fp8_sm90, *_FP8_CUDA, why_not=lambda *args: _fp8_why_not(*args[:2])),
    ref=Backend("ref", _fp8_ref, *_FP8_TORCH),
    describe=_fp8_plan,
    load=_C.fp8_quantize_load,
)

_FP8_QUANTIZE_OUT = Op(
    f"{_FP8}_out",
    "(Tensor x, Tensor(a!) q, Tensor(b!) scale, str granularity='row', str? backend=None) -> ()",
    check=_check_fp8_out,
    fake=lambda *args: None,
    sm90=Backend(
        "sm90",
        lambda *args: _fp8_sm90_out(*args),
        *_FP8_CUDA,
        why_not=lambda *args: _fp8_why_not(args[0], args[3]),
    ),
    ref=Backend("ref", _fp8_ref_out, *_FP8_TORCH),
    family=_FP8,
)

_FP8_QUANTIZE_STATIC = Op(
    f"{_FP8}_static",
    "(Tensor x, Tensor scale, str? backend=None) -> Tensor",
    check=_check_fp8_static,
    fake=lambda x, scale, _: torch.empty(x.shape, dtype=E4M3, device=x.device),
    sm90=Backend(
        "sm90",
        _fp8_static_sm90,
        *_FP8_CUDA,
        why_not=lambda *args: _fp8_why_not(args[0], "tensor"),
    ),
    ref=Backend("ref", _fp8_static_ref, *_FP8_TORCH),
    family=_FP8,
)

_FP8_QUANTIZE_STATIC_OUT = Op(
    f"{_FP8}_static_out",
    "(Tensor x, Tensor scale, Tensor(a!) q, str? backend=None) -> ()",
    check=_check_fp8_static,
    fake=lambda *args: None,
    sm90=Backend(
        "sm90",
        lambda x, scale, q, _: _C.fp8_quantize_static(x, scale, q),
        *_FP8_CUDA,
        why_not=lambda *args: _fp8_why_not(args[0], "tensor"),
    ),
    ref=Backend("ref", _fp8_static_ref_out, *_FP8_TORCH),
    family=_FP8,
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
    """Quantises to e4m3: ``q * scale`` is ``x`` to 1 part in 16.

    ``scale = max(amax / 448, 2**-126)`` and ``q = e4m3(x * (1 / scale))``: float32, each operation
    rounded to nearest even, as is the conversion, which saturates at 448. Bit for bit the same on
    every backend. A NaN, or an infinity, makes NaN of what shares its scale, where 0 is due.

    There is no derivative. Works under torch.compile and torch.export, and in CUDA graphs; it
    never synchronises.

    Args:
        x: ``[T, K]``, float32, bfloat16 or float16; T and K may be 0. The precompiled kernels take
            K that is a multiple of 8 and rows at any distance that is a multiple of 16 bytes; ref
            takes others.
        granularity: What shares a scale: ``"tensor"``, ``"row"``, ``"1x128"`` (128 neighbours of a
            row, as DeepSeek-V3, arXiv:2412.19437, has for activations) or ``"128x128"`` (a tile, as
            there for weights). A last group or tile may be smaller.
        scale: A scale ``[1, 1]`` to use instead, float32, on the device of ``x``, with
            ``granularity="tensor"``.
        out: ``(q, scale)`` to write to: contiguous, of the shapes and dtypes below; with a given
            ``scale`` that must be it.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``q`` ``[T, K]`` float8_e4m3fn, and ``scale`` float32: ``[1, 1]``, ``[T, 1]``,
        ``[T, ceil(K / 128)]`` or ``[ceil(T / 128), ceil(K / 128)]``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such granularity or
            backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> q, scale = tiercel.fp8_quantize(activations, "1x128")
    """
    if out is not None and (not isinstance(out, (tuple, list)) or len(out) != 2):
        got = f"{len(out)} values" if isinstance(out, (tuple, list)) else type(out).__name__
        raise TypeError(f"{_FP8}: `out` must be a pair (q, scale), got {got}")
    if scale is None:
        if out is None:
            result: tuple[Tensor, Tensor] = _FP8_QUANTIZE(x, granularity, backend)
            return result
        _FP8_QUANTIZE_OUT(x, *out, granularity, backend)
        return out[0], out[1]
    if granularity != "tensor":
        raise ValueError(f"{_FP8}: a given `scale` needs granularity='tensor', got {granularity!r}")
    if out is None:
        return _FP8_QUANTIZE_STATIC(x, scale, backend), scale
    if out[1] is not scale:
        raise ValueError(f"{_FP8}: the second of `out` must be the given `scale` itself")
    _FP8_QUANTIZE_STATIC_OUT(x, scale, out[0], backend)
    return out[0], scale


@nvfp4.QUANTIZE.export
def nvfp4_quantize(
    x: Tensor,
    *,
    global_scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantises to NVFP4: 16 neighbours of a row become 16 e2m1 values and one e4m3 scale.

    ``scale = e4m3(min(amax / 6 / global_scale, 448))`` and
    ``q = e2m1(x * (1 / (scale * global_scale)))``: float32, each operation rounded to nearest even,
    as are the two conversions; e2m1 saturates at 6. Bit for bit the same on every backend. A group
    whose scale comes out as 0 becomes zeros, one with a NaN has the scale NaN, one with an infinity
    the scale 448. Signs stay, that of 0 too.

    There is no derivative. Works under torch.compile and torch.export, and in CUDA graphs; it
    never synchronises.

    Args:
        x: ``[T, K]``, float32, bfloat16 or float16, K a multiple of 16; T and K may be 0. The
            precompiled kernels take rows at any distance that is a multiple of 16 bytes; ref takes
            others.
        global_scale: ``[1]`` float32, on the device of ``x``; None is 1. The largest magnitude of
            ``x`` over ``448 * 6`` uses all of the scales' range.
        out: ``(q, scale)`` to write to: contiguous, of the shapes and dtypes below.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``q`` ``[T, K / 2]`` float4_e2m1fn_x2: two values a byte, the first in its low half; and
        ``scale`` ``[T, K / 16]`` float8_e4m3fn.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> q, scale = tiercel.nvfp4_quantize(weight)
    """
    tensors = (x,) if global_scale is None else (x, global_scale)
    if out is None:
        operator = nvfp4.QUANTIZE if global_scale is None else nvfp4.QUANTIZE_SCALED
        result: tuple[Tensor, Tensor] = operator(*tensors, backend)
        return result
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        got = f"{len(out)} values" if isinstance(out, (tuple, list)) else type(out).__name__
        raise TypeError(f"nvfp4_quantize: `out` must be a pair (q, scale), got {got}")
    operator = nvfp4.QUANTIZE_OUT if global_scale is None else nvfp4.QUANTIZE_SCALED_OUT
    operator(*tensors, *out, backend)
    return out[0], out[1]


@nvfp4.DEQUANTIZE.export
def nvfp4_dequantize(
    q: Tensor,
    scale: Tensor,
    *,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The values that NVFP4 stands for: ``q * (scale * global_scale)``, rounded to ``dtype``.

    Both products are float32, rounded once each to nearest even; without a global scale they are
    exact. Bit for bit the same on every backend.

    There is no derivative. Works under torch.compile and torch.export, and in CUDA graphs; it
    never synchronises.

    Args:
        q: ``[T, K / 2]`` float4_e2m1fn_x2, contiguous: two values a byte, the first in its low
            half. K is a multiple of 16.
        scale: ``[T, K / 16]`` float8_e4m3fn, contiguous, on the device of ``q``.
        global_scale: ``[1]`` float32, on the device of ``q``; None is 1.
        dtype: ``torch.bfloat16``, ``torch.float16`` or ``torch.float32``.
        out: ``[T, K]`` to write to, contiguous, of one of these dtypes; then ``dtype`` does not
            count.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``[T, K]`` of ``dtype``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> weight = tiercel.nvfp4_dequantize(q, scale)
    """
    tensors = (q, scale) if global_scale is None else (q, scale, global_scale)
    if out is None:
        operator = nvfp4.DEQUANTIZE if global_scale is None else nvfp4.DEQUANTIZE_SCALED
        result: Tensor = operator(*tensors, dtype, backend)
        return result
    operator = nvfp4.DEQUANTIZE_OUT if global_scale is None else nvfp4.DEQUANTIZE_SCALED_OUT
    operator(*tensors, out, backend)
    return out
