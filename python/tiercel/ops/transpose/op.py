# SPDX-License-Identifier: Apache-2.0
"""Transposed copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tiercel import _C
from tiercel.core.op import Gradient, Lookup, Native, Op
from tiercel.core.spec import Call
from tiercel.ops.transpose import reference as ref
from tiercel.ops.transpose.spec import COPY_TRANSPOSE, TILES

__all__ = ["copy_transpose"]


def _launch(native: Callable[..., Any], call: Call) -> Any:
    return native(call.x, call.out, call.tile_size or 0)


def _gradients(ctx: Any, grad: Tensor | None) -> dict[str, Tensor | None]:
    return {"x": None if grad is None else grad.transpose(-2, -1)}


_COPY_TRANSPOSE = Op(
    COPY_TRANSPOSE,
    sm90=Native(
        _C.copy_transpose,
        _C.copy_transpose_plan,
        ("x", "out", Lookup("tile_size", {None: 0} | {tile: tile for tile in TILES})),
        "squares of vectors turned in registers; shared memory where rows are not aligned",
        load=_C.copy_transpose_load,
        launch=_launch,
    ),
    reference=lambda call: ref.copy_transpose(call.x),
    method="torch.transpose and a copy",
    gradient=Gradient(lambda ctx, call, result: None, _gradients),
)


@_COPY_TRANSPOSE.export
def copy_transpose(
    x: Tensor,
    *,
    tile_size: int | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Copies a matrix, or each matrix of a batch, transposed.

    The result equals ``x.transpose(-2, -1).contiguous()`` bit for bit.

    Differentiable in ``x`` where its dtype is. Works under torch.compile and torch.export, and in
    CUDA graphs; it never synchronises.

    Args:
        x: ``[M, N]`` or ``[B, M, N]`` of any dtype of 1, 2 or 4 bytes that is float32, bfloat16,
            float16, float8_e4m3fn, float8_e5m2, int32, int16, int8, uint8 or bool. Any size and any
            strides; fastest where rows are contiguous. The fastest path needs M, N and row starts
            that are multiples of 16 bytes.
        tile_size: The edge, in elements, of the square tile of a block of threads: 32, 64 or 128.
            None: automatic.
        out: ``[N, M]`` or ``[B, N, M]`` to write to: contiguous, of the dtype and on the device of
            ``x``, not overlapping it. Then no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[N, M]`` or ``[B, N, M]``, contiguous.

    Raises:
        TypeError: A dtype is not one of the above, or ``x`` is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such tile or backend.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> keys = tiercel.copy_transpose(keys)  # [heads, S, D] -> [heads, D, S]
    """
    if out is None:
        return _COPY_TRANSPOSE.pick()(x, tile_size, backend)  # type: ignore[no-any-return]
    return _COPY_TRANSPOSE.into()(out, x, tile_size, backend)  # type: ignore[no-any-return]
