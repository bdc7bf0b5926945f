# SPDX-License-Identifier: Apache-2.0
"""Sums, means and maxima."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._op import Autograd, Backend, Op
from tiercel.core import platform
from tiercel.core.checks import (
    check_bool,
    check_contiguous,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
)
from tiercel.core.eager import empty
from tiercel.core.platform import Reason
from tiercel.ops.reduce.reference import reduce as reference

__all__ = ["reduce", "reduce_sum"]

_NAME = "reduce"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INDEX = {"sum": 0, "mean": 1, "max": 2, "amax": 2}  # ReduceOp in kernels/reduce/reduce.h


def _check(
    x: Tensor,
    dim: int | None,
    op: str,
    keepdim: bool,
    dtype: torch.dtype | None,
    backend: str | None,
) -> None:
    if x.layout != torch.strided or x.is_nested:
        check_rank(_NAME, "x", x, 2)  # says so
    check_dtype(_NAME, "x", x.dtype, _DTYPES)
    if x.dim() < 1:
        raise ValueError(f"{_NAME}: `x` must have at least 1 dimension, got 0")
    if dim is not None:
        if not hasattr(dim, "__index__") or isinstance(dim, bool):
            raise TypeError(f"{_NAME}: `dim` must be an int or None, got {type(dim).__name__}")
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"{_NAME}: `dim` must be from {-x.dim()} to {x.dim() - 1}, got {dim}")
    if op not in _INDEX:
        raise ValueError(f"{_NAME}: `op` must be one of {', '.join(_INDEX)}, got {op!r}")
    check_bool(_NAME, "keepdim", keepdim)
    if dtype is not None and dtype != x.dtype:
        check_dtype(_NAME, "dtype", dtype, (x.dtype, torch.float32))
    if _INDEX[op] == 2:
        empty = x.numel() == 0 if dim is None else x.shape[dim] == 0
        if empty and _output(x, dim, op, keepdim).numel() > 0:
            where = "" if dim is None else f" in dimension {dim % x.dim()}"
            raise ValueError(
                f"{_NAME}: `x` must not be empty{where} for a maximum, got shape {list(x.shape)}"
            )


def _check_out(
    x: Tensor, out: Tensor, dim: int | None, op: str, keepdim: bool, backend: str | None
) -> None:
    _check(x, dim, op, keepdim, None, backend)
    if out.dtype != torch.float32:
        check_dtype(_NAME, "out", out.dtype, (x.dtype,))
    check_shape(_NAME, "out", out, _shape(x, dim, keepdim), "what is left of `x`")
    check_same_device(_NAME, "out", out, "x", x)
    check_contiguous(_NAME, "out", out)


def _shape(x: Tensor, dim: int | None, keepdim: bool) -> tuple[int, ...]:
    sizes = tuple(x.shape)  # torch's own are slow to cut
    if dim is None:
        return (1,) * len(sizes) if keepdim else ()
    dim %= len(sizes)
    return (*sizes[:dim], 1, *sizes[dim + 1 :]) if keepdim else sizes[:dim] + sizes[dim + 1 :]


def _output(
    x: Tensor,
    dim: int | None,
    op: str,
    keepdim: bool,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    return torch.empty(_shape(x, dim, keepdim), dtype=dtype or x.dtype, device=x.device)


def _launch(x: Tensor, out: Tensor, dim: int | None, op: str, *, launch: Any = _C.reduce) -> None:
    if dim is None:
        x, dim = x.reshape(-1), 0
    elif dim < 0:
        dim += x.dim()
    index = _INDEX[op]
    needed = launch(x, out, None, dim, index)
    if needed:
        launch(x, out, empty(x, (needed,), torch.float32), dim, index)


def _sm90(
    x: Tensor,
    dim: int | None,
    op: str,
    keepdim: bool,
    dtype: torch.dtype | None,
    backend: str | None,
) -> Tensor:
    if dtype is not None and dtype != torch.float32 and dtype != x.dtype:
        _check(x, dim, op, keepdim, dtype, backend)
    out: Tensor = empty(x, _shape(x, dim, keepdim), dtype or x.dtype)
    _launch(x, out, dim, op)
    return out


def _sm90_out(
    x: Tensor, out: Tensor, dim: int | None, op: str, keepdim: bool, backend: str | None
) -> None:
    if out.shape != _shape(x, dim, keepdim):  # the launcher counts elements only
        _check_out(x, out, dim, op, keepdim, backend)
    _launch(x, out, dim, op)


def _ref(
    x: Tensor,
    dim: int | None,
    op: str,
    keepdim: bool,
    dtype: torch.dtype | None,
    backend: str | None,
) -> Tensor:
    return reference(x, dim, op, keepdim=keepdim, dtype=dtype).contiguous()


def _ref_out(
    x: Tensor, out: Tensor, dim: int | None, op: str, keepdim: bool, backend: str | None
) -> None:
    out.copy_(reference(x, dim, op, keepdim=keepdim, dtype=out.dtype))


def _plan(x: Tensor, dim: int | None, op: str, *options: Any) -> dict[str, Any]:
    out = _output(x, dim, op, *options)
    if dim is None:
        x, dim = x.reshape(-1), 0
    return dict(_C.reduce_plan(x, out, None, dim % x.dim(), _INDEX[op]))


def _why_not(x: Tensor, dim: int | None, op: str, *options: Any) -> Reason | None:
    reason = platform.why_not(x.device)
    if reason is not None:
        return reason
    try:
        _plan(x, dim, op, *options)
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).removeprefix(f"{_NAME}: "))
    return None


def _why_not_out(x: Tensor, out: Tensor, dim: int | None, op: str, keepdim: bool, _: Any) -> Any:
    return _why_not(x, dim, op, keepdim)


def _save(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, ctx.op, ctx.keepdim = args[:4]
    ctx.shape, ctx.dtype = x.shape, x.dtype
    if _INDEX[ctx.op] == 2:
        ctx.save_for_backward(x, output)


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None]:
    if grad is None:
        return (None,)

    def spread(result: Tensor) -> Tensor:
        """The shape with the reduced dimensions kept."""
        if ctx.keepdim:
            return result
        if ctx.dim is None:
            return result.reshape([1] * len(ctx.shape))
        return result.unsqueeze(ctx.dim)

    dims = list(range(len(ctx.shape))) if ctx.dim is None else [ctx.dim]
    grad = spread(grad)
    if _INDEX[ctx.op] == 2:
        x, output = ctx.saved_tensors
        largest = x == spread(output)
        shares = largest.sum(dims, keepdim=True)
        return ((largest * (grad / shares)).to(ctx.dtype),)
    if ctx.op == "mean":
        count = 1
        for dim in dims:
            count *= ctx.shape[dim]
        grad = grad / count
    return (grad.to(ctx.dtype).expand(ctx.shape),)


_CUDA = ("one read, float32 sums in a fixed order", "cuda")
_TORCH = ("torch.sum, torch.mean and torch.amax in float32", "torch")

_REDUCE = Op(
    _NAME,
    "(Tensor x, int? dim=None, str op='sum', bool keepdim=False, ScalarType? dtype=None,"
    " str? backend=None) -> Tensor",
    check=_check,
    fake=_output,
    sm90=Backend("sm90", _sm90, *_CUDA, why_not=_why_not),
    ref=Backend("ref", _ref, *_TORCH),
    autograd=Autograd(_save, _backward),
    describe=_plan,
    load=_C.reduce_load,
)

_REDUCE_OUT = Op(
    f"{_NAME}_out",
    "(Tensor x, Tensor(a!) out, int? dim=None, str op='sum', bool keepdim=False,"
    " str? backend=None) -> ()",
    check=_check_out,
    fake=lambda *args: None,
    sm90=Backend("sm90", _sm90_out, *_CUDA, why_not=_why_not_out),
    ref=Backend("ref", _ref_out, *_TORCH),
    family=_NAME,
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
            kernels take what leaves at most two dimensions when those that lie side by side in
            memory are joined: every contiguous ``x``, and every one of up to three dimensions.
            With ``dim=None`` an ``x`` that cannot be viewed flat is copied first.
        dim: The dimension, or None for all.
        op: ``"sum"``, ``"mean"``, ``"max"`` or ``"amax"``.
        keepdim: Keep reduced dimensions, with size 1.
        dtype: The result's: that of ``x`` (the default) or float32.
        out: What to write to: contiguous, of the result's shape, of the dtype of ``x`` or float32,
            on the device of ``x``. Then no gradient flows and ``dtype`` does not count.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``x``'s shape without ``dim``.

    Raises:
        TypeError: A dtype is not one of the above, or ``x`` is no tensor.
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
    _REDUCE_OUT(x, out, dim, op, keepdim, backend)
    return out


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
