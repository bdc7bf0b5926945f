# SPDX-License-Identifier: Apache-2.0
"""Sums, means and maxima."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.eager import empty
from tiercel.core.op import Gradient, Native, Op, composite
from tiercel.core.spec import Call
from tiercel.ops.reduce import reference as ref
from tiercel.ops.reduce.contract import over_the_middle
from tiercel.ops.reduce.spec import MAXIMA, REDUCE, REDUCE_SUM, shape_left

__all__ = ["reduce", "reduce_sum"]

_NUMBER = {"sum": 0, "mean": 1, "max": 2, "amax": 2}  # ReduceOp in kernels/reduce/reduce.h


def _rows(x: Tensor, dim: int | None) -> tuple[Tensor, int]:
    """Returns the tensor and the dimension to reduce, counted from the front."""
    if dim is None:
        return x.reshape(-1), 0
    return x, dim + x.dim() if dim < 0 else dim


# Positional arguments: the generic path from a declaration takes longer than the launch.
def _run(
    x: Tensor, dim: int | None, op: str, keepdim: bool, dtype: Any, out: Tensor | None
) -> Tensor | None:
    shape, made = shape_left(x, dim, keepdim), None
    if out is None:
        out = made = empty(x, shape, dtype or x.dtype)
    elif out.shape != shape or out.dtype not in (x.dtype, torch.float32):
        # The native function counts elements only.
        call = Call(x=x, dim=dim, op=op, keepdim=keepdim, dtype=dtype, out=out)
        REDUCE.validate(call)
    x, dim = _rows(x, dim)
    number = _NUMBER[op]
    # Elements of a workspace, without which nothing was launched.
    needed = _C.reduce(x, out, None, dim, number)
    if needed:
        _C.reduce(x, out, empty(x, (needed,), torch.float32), dim, number)
    return made


def _plan(
    x: Tensor, dim: int | None, op: str, keepdim: bool, dtype: Any, out: Tensor
) -> dict[str, Any]:
    x, dim = _rows(x, dim)
    return dict(_C.reduce_plan(x, out, None, dim, _NUMBER[op]))


def _reference(call: Call) -> Tensor:
    return ref.reduce(call.x, call.dim, call.op, keepdim=call.keepdim, dtype=call.dtype)


def _save(ctx: Any, call: Call, result: Tensor) -> None:
    ctx.dim, ctx.op, ctx.keepdim = call.dim, call.op, call.keepdim
    ctx.shape, ctx.dtype = call.x.shape, call.x.dtype
    if ctx.op in MAXIMA:
        ctx.save_for_backward(call.x, result)


def _gradients(ctx: Any, grad: Tensor | None) -> dict[str, Tensor | None]:
    if grad is None:
        return {}

    def spread(result: Tensor) -> Tensor:
        """The shape with the reduced dimensions kept."""
        if ctx.keepdim:
            return result
        if ctx.dim is None:
            return result.reshape([1] * len(ctx.shape))
        return result.unsqueeze(ctx.dim)

    dims = list(range(len(ctx.shape))) if ctx.dim is None else [ctx.dim]
    grad = spread(grad)
    if ctx.op in MAXIMA:
        x, output = ctx.saved_tensors
        largest = x == spread(output)
        shares = largest.sum(dims, keepdim=True)
        return {"x": (largest * (grad / shares)).to(ctx.dtype)}
    if ctx.op == "mean":
        count = 1
        for dim in dims:
            count *= ctx.shape[dim]
        grad = grad / count
    return {"x": grad.to(ctx.dtype).expand(ctx.shape)}


_REDUCE = Op(
    REDUCE,
    sm90=Native(
        _run,
        _plan,
        ("x", "dim", "op", "keepdim", "dtype", "out"),
        "one read, float32 sums in a fixed order",
        load=_C.reduce_load,
        returns=True,
    ),
    reference=_reference,
    method="torch.sum, torch.mean and torch.amax in float32",
    gradient=Gradient(_save, _gradients),
    plugin=over_the_middle,
)


@_REDUCE.export
def reduce(
    x: Tensor,
    dim: int | None = None,
    op: str = "sum",
    *,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The sum, mean or maximum over one dimension, or over all of them.

    Sums are float32 in a fixed order, and rounded once: the same input gives the same bits on every
    H100 and H200. NaN in, NaN out. A sum over nothing is 0, a mean NaN.

    ``"max"`` is another name for ``"amax"``: values only, without the indices that
    :func:`torch.max` returns beside them; the gradient is shared evenly among equal maxima, as
    :func:`torch.amax` does.

    Differentiable in ``x``. Works under torch.compile and torch.export, and in CUDA graphs; it
    never synchronises.

    Args:
        x: Of one dimension or more, float32, bfloat16 or float16, any strides. The precompiled
            kernels take strides that leave at most two dimensions besides ``dim`` after merging
            contiguous ones: every contiguous ``x``, and every ``x`` of up to three dimensions. With
            ``dim=None`` an ``x`` that cannot be viewed flat is copied first.
        dim: The dimension, or None for all.
        op: ``"sum"``, ``"mean"``, ``"max"`` or ``"amax"``.
        keepdim: Keep reduced dimensions, with size 1.
        dtype: The result's: that of ``x`` (the default) or float32.
        out: Tensor to write to: contiguous, of the result's shape, of the dtype of ``x`` or
            float32, on the device of ``x``. Then no gradient flows and ``dtype`` is ignored.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``x``'s shape without ``dim``.

    Raises:
        TypeError: A dtype is not one of the above, or ``x`` is not a tensor.
        ValueError: A dimension, shape, stride or device does not fit, a maximum is over nothing, or
            there is no such operation or backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take these strides.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> column_means = tiercel.reduce(x, 0, "mean")
    """
    if out is None:
        result: Tensor = _REDUCE.pick()(x, dim, op, keepdim, dtype, backend)
        return result
    return _REDUCE.into()(out, x, dim, op, keepdim, dtype, backend)  # type: ignore[no-any-return]


@composite(REDUCE_SUM)
def reduce_sum(
    x: Tensor,
    dim: int | None = None,
    *,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The sum over one dimension, or over all: :func:`reduce` with ``op="sum"``.

    Example:
        >>> total = tiercel.reduce_sum(x, dtype=torch.float32)
    """
    return reduce(x, dim, "sum", keepdim=keepdim, dtype=dtype, out=out, backend=backend)
