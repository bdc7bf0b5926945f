# SPDX-License-Identifier: Apache-2.0
"""Transposed copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._op import Autograd, Backend, Op
from tiercel.core import platform
from tiercel.core.checks import (
    check_contiguous,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
)
from tiercel.core.eager import empty
from tiercel.core.platform import Reason
from tiercel.ops.transpose import reference as ref

__all__ = ["copy_transpose"]

_NAME = "copy_transpose"
_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.int32,
)
_TILES = (32, 64, 128)


def _shape(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:-2], x.shape[-1], x.shape[-2])


def _check(x: Tensor, tile_size: int | None, backend: str | None) -> None:
    if x.layout != torch.strided or x.is_nested:
        check_rank(_NAME, "x", x, 2)  # says so
    if x.dim() not in (2, 3):
        raise ValueError(
            f"{_NAME}: `x` must have 2 or 3 dimensions, got {x.dim()} (shape {list(x.shape)})"
        )
    check_dtype(_NAME, "x", x.dtype, _DTYPES)
    if tile_size is not None and tile_size not in _TILES:
        raise ValueError(f"{_NAME}: `tile_size` must be 32, 64 or 128, got {tile_size}")


def _check_out(x: Tensor, out: Tensor, tile_size: int | None, backend: str | None) -> None:
    _check(x, tile_size, backend)
    check_dtype(_NAME, "out", out.dtype, (x.dtype,))
    check_shape(_NAME, "out", out, _shape(x), "[N, M]" if x.dim() == 2 else "[B, N, M]")
    check_same_device(_NAME, "out", out, "x", x)
    check_contiguous(_NAME, "out", out)


def _output(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(_shape(x), dtype=x.dtype, device=x.device)


# The fast path: kept flat, each line costs host time.
def _sm90(
    x: Tensor, tile_size: int | None, backend: str | None, *, launch: Any = _C.copy_transpose
) -> Tensor:
    *batch, rows, columns = x.shape
    out: Tensor = empty(x, (*batch, columns, rows), x.dtype)
    launch(x, out, tile_size or 0)
    return out


def _sm90_out(x: Tensor, out: Tensor, tile_size: int | None, backend: str | None) -> None:
    _C.copy_transpose(x, out, tile_size or 0)


def _ref(x: Tensor, tile_size: int | None, backend: str | None) -> Tensor:
    return ref.copy_transpose(x)


def _ref_out(x: Tensor, out: Tensor, tile_size: int | None, backend: str | None) -> None:
    out.copy_(x.transpose(-2, -1))


def _plan(x: Tensor, tile_size: int | None, backend: str | None = None) -> dict[str, Any]:
    return dict(_C.copy_transpose_plan(x, _output(x), tile_size or 0))


def _why_not(x: Tensor, *_: Any) -> Reason | None:
    return platform.why_not(x.device)


def _save(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
    pass


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None]:
    return (None if grad is None else grad.transpose(-2, -1),)


_CUDA = ("squares of vectors turned in registers; shared memory where rows are not aligned", "cuda")
_TORCH = ("torch.transpose and a copy", "torch")

_COPY_TRANSPOSE = Op(
    _NAME,
    "(Tensor x, int? tile_size=None, str? backend=None) -> Tensor",
    check=_check,
    fake=_output,
    sm90=Backend("sm90", _sm90, *_CUDA, why_not=_why_not),
    ref=Backend("ref", _ref, *_TORCH),
    autograd=Autograd(_save, _backward),
    describe=_plan,
    load=_C.copy_transpose_load,
)

_COPY_TRANSPOSE_OUT = Op(
    f"{_NAME}_out",
    "(Tensor x, Tensor(a!) out, int? tile_size=None, str? backend=None) -> ()",
    check=_check_out,
    fake=lambda *args: None,
    sm90=Backend("sm90", _sm90_out, *_CUDA, why_not=_why_not),
    ref=Backend("ref", _ref_out, *_TORCH),
    family=_NAME,
)


@_COPY_TRANSPOSE.export
def copy_transpose(
    x: Tensor,
    *,
    tile_size: int | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Copies a matrix, or each matrix of a batch, with rows and columns exchanged.

    The bits of every element are copied as they are. ``x.transpose(-2, -1).contiguous()`` gives the
    same.

    Differentiable in ``x`` where its dtype is. Works under torch.compile and torch.export, and in
    CUDA graphs; it never synchronises.

    Args:
        x: ``[M, N]`` or ``[B, M, N]`` of any dtype of 1, 2 or 4 bytes that is float32, bfloat16,
            float16, float8_e4m3fn, float8_e5m2, int32, int16, int8, uint8 or bool. Any size and
            any strides; fastest where rows are contiguous. M, N and row starts that are multiples
            of 16 bytes take the shortest way.
        tile_size: The edge, in elements, of the square that a block of threads turns: 32, 64 or
            128. None chooses the tile.
        out: ``[N, M]`` or ``[B, N, M]`` to write to: contiguous, of the dtype and on the device of
            ``x``, not overlapping it. Then no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``[N, M]`` or ``[B, N, M]``, contiguous.

    Raises:
        TypeError: A dtype is not one of the above, or ``x`` is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such tile or backend.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> keys = tiercel.copy_transpose(keys)  # [heads, S, D] -> [heads, D, S]
    """
    if out is None:
        result: Tensor = _COPY_TRANSPOSE(x, tile_size, backend)
        return result
    _COPY_TRANSPOSE_OUT(x, out, tile_size, backend)
    return out
