# SPDX-License-Identifier: Apache-2.0
"""Quantisation to e4m3 of a matrix and its transpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.op import Lookup, Native, Op
from tiercel.core.spec import Call
from tiercel.ops.quant import reference as ref
from tiercel.ops.quant import spec

__all__ = ["fp8_quantize_transpose"]

# Numbers of Fp8Granularity.
_NUMBER = {name: list(spec.TILES).index(name) for name in spec.TURNED_GRANULARITIES}


def _fake(call: Call) -> tuple[Tensor, ...]:
    made = _OP.spec.empty(call)
    if not torch.compiler.is_exporting():
        return made
    # torch would ask whether a rounded quotient is 1 (see fp8_quantize). Such a size becomes a
    # symbol of its own.
    down, across = spec.TILES[call.granularity]
    of_one = ((1, 1), (down, across), (1, 128), (128, down))

    def named(result: Tensor, tiles: tuple[int, int]) -> Tensor:
        rounded = [
            isinstance(n, torch.SymInt) and of > 1
            for n, of in zip(result.shape, tiles, strict=True)
        ]
        if not any(rounded):
            return result
        context = torch.library.get_ctx()
        shape = [
            context.new_dynamic_size() if new else size
            for size, new in zip(result.shape, rounded, strict=True)
        ]
        return result.new_empty(shape)

    return tuple(named(result, tiles) for result, tiles in zip(made, of_one, strict=True))


def _launch(native: Callable[..., Any], call: Call) -> Any:
    """Launches on a copy where rows do not begin at multiples of 16 bytes: a gradient may lie
    anywhere, and may be one expanded number."""
    x = call.x
    fits = x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0
    if not fits or x.data_ptr() % 16 != 0:
        call.x = x.clone(memory_format=torch.contiguous_format)
    return _OP.launch(native, call)


_OP = Op(
    spec.FP8_QUANTIZE_TRANSPOSE,
    sm90=Native(
        _C.fp8_quantize_transpose,
        _C.fp8_quantize_transpose_plan,
        ("x", "q", "scale", "q_t", "scale_t", Lookup("granularity", _NUMBER)),
        "a tile of 128x128 in registers, turned through shared memory",
        load=_C.fp8_quantize_transpose_load,
        launch=_launch,
    ),
    reference=lambda call: ref.fp8_quantize_transpose(call.x, call.granularity),
    method="fp8_quantize's, of x and of its transpose",
    fake=_fake,
    out=False,
)


@_OP.export
def fp8_quantize_transpose(
    x: Tensor, granularity: str = "1x128", *, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantises ``x`` and its transpose to e4m3, reading ``x`` once.

    The weight gradient of a float8 layer sums over tokens, and tensor cores take float8 operands
    only if they are contiguous along the summed dimension. The results have the bits of
    :func:`tiercel.fp8_quantize` for ``x`` and for ``x.t()``, whose rows are padded with zeros. With
    ``"1x128"`` each has scales along its own rows; with ``"128x128"`` the values and scales of one
    are the other's, transposed.

    There is no derivative. Works under torch.compile and torch.export, and in CUDA graphs; it
    never synchronises.

    Args:
        x: ``[T, K]``, float32, bfloat16 or float16; T and K may be 0. The precompiled kernels take
            K that is a multiple of 8; ref takes others. Tensors whose row stride is not a multiple
            of 16 bytes are copied first.
        granularity: ``"1x128"`` for activations and gradients, ``"128x128"`` for weights.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``q`` ``[T, K]`` float8_e4m3fn and its ``scale``, float32: ``[T, ceil(K / 128)]`` or
        ``[ceil(T / 128), ceil(K / 128)]``. Then ``q_t`` ``[K, P]``, where P is T rounded up to a
        multiple of 128, and its ``scale_t``: ``[P / 128, K]``, one per 128 tokens of a row, or
        ``[ceil(K / 128), P / 128]``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape or device does not fit, or there is no such granularity or backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> q, scale, q_t, scale_t = tiercel.fp8_quantize_transpose(activations)
    """
    return _OP(x, granularity, backend)  # type: ignore[no-any-return]
