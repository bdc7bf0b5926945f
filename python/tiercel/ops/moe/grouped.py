# SPDX-License-Identifier: Apache-2.0
"""Grouped products: rows in groups, each group with a matrix of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._op import Autograd, Backend, Op
from tiercel.core.checks import (
    check_contiguous,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
)
from tiercel.core.index_checks import Index, ascending, between
from tiercel.ops.moe import reference as ref
from tiercel.ops.moe.halves import DTYPES, reason_of

__all__ = ["grouped_gemm"]

_NAME = "grouped_gemm"
# As GroupedKind in grouped_gemm.h counts.
_PLAIN, _OF_X, _OF_WEIGHT = range(3)
_CUTE = ("TMA and wgmma; persistent blocks find their groups' tiles on the device", "cute")


def _check_offsets(op: str, offsets: Tensor, groups: int | None) -> None:
    check_rank(op, "offsets", offsets, 1)
    check_dtype(op, "offsets", offsets.dtype, (torch.int32, torch.int64))
    if groups is None:
        if offsets.shape[0] < 1:
            raise ValueError(f"{op}: `offsets` must have at least 1 element, got 0")
    else:
        check_shape(op, "offsets", offsets, (groups + 1,), "[E + 1]")
    check_contiguous(op, "offsets", offsets)


def _check(x: Tensor, w: Tensor, offsets: Tensor, backend: str | None) -> None:
    check_rank(_NAME, "x", x, 2)
    check_dtype(_NAME, "x", x.dtype, DTYPES)
    check_rank(_NAME, "w", w, 3)
    check_dtype(_NAME, "w", w.dtype, (x.dtype,))
    check_shape(_NAME, "w", w, (*w.shape[:2], x.shape[1]), "[E, N, K]")
    _check_offsets(_NAME, offsets, w.shape[0])
    for name, tensor in (("w", w), ("offsets", offsets)):
        check_same_device(_NAME, name, tensor, "x", x)


def _indices(x: Tensor, _: Tensor, offsets: Tensor, *rest: Any) -> list[Index]:
    return [between("offsets", offsets, 0, x.shape[0]), ascending("offsets", offsets)]


def _output(x: Tensor, w: Tensor, *_: Any) -> Tensor:
    return torch.empty((x.shape[0], w.shape[1]), dtype=x.dtype, device=x.device)


def _sm90(x: Tensor, w: Tensor, offsets: Tensor, backend: str | None) -> Tensor:
    out = x.new_empty((x.shape[0], w.shape[1]))
    _C.grouped_gemm(x, w, offsets, out, _PLAIN)
    return out


def _plan(x: Tensor, w: Tensor, offsets: Tensor, *_: Any) -> dict[str, Any]:
    return dict(_C.grouped_gemm_plan(x, w, offsets, _output(x, w), _PLAIN))


# ------------------------------------------------------------------------------------- gradients


def _operator(kind: int) -> Op:
    """Of x, grad[rows] @ w[e]; of w, grad[rows].T @ x[rows]."""
    of_weight = kind == _OF_WEIGHT
    name = f"{_NAME}_backward_{'weight' if of_weight else 'x'}"
    other_name = "x" if of_weight else "w"

    def check(grad: Tensor, other: Tensor, offsets: Tensor, *_: Any) -> None:
        check_rank(name, "grad", grad, 2)
        check_dtype(name, "grad", grad.dtype, DTYPES)
        check_rank(name, other_name, other, 2 if of_weight else 3)
        check_dtype(name, other_name, other.dtype, (grad.dtype,))
        if of_weight:
            check_shape(name, "x", other, (grad.shape[0], other.shape[1]), "[M, K]")
        else:
            sizes = (other.shape[0], grad.shape[1], other.shape[2])
            check_shape(name, "w", other, sizes, "[E, N, K]")
        _check_offsets(name, offsets, None if of_weight else other.shape[0])
        for label, tensor in ((other_name, other), ("offsets", offsets)):
            check_same_device(name, label, tensor, "grad", grad)

    def empty(grad: Tensor, other: Tensor, offsets: Tensor, *_: Any) -> Tensor:
        if of_weight:
            return grad.new_empty((offsets.shape[0] - 1, grad.shape[1], other.shape[1]))
        return grad.new_empty((grad.shape[0], other.shape[2]))

    def run(grad: Tensor, other: Tensor, offsets: Tensor, _: Any) -> Tensor:
        out = empty(grad, other, offsets)
        _C.grouped_gemm(grad.contiguous(), other, offsets, out, kind)
        return out

    def plan(grad: Tensor, other: Tensor, offsets: Tensor, *_: Any) -> dict[str, Any]:
        out = empty(grad, other, offsets)
        return dict(_C.grouped_gemm_plan(grad.contiguous(), other, offsets, out, kind))

    reference = ref.grouped_gemm_backward_weight if of_weight else ref.grouped_gemm_backward_x
    return Op(
        name,
        f"(Tensor grad, Tensor {other_name}, Tensor offsets, str? backend=None) -> Tensor",
        check=check,
        fake=empty,
        sm90=Backend(
            "sm90", run, *_CUTE, why_not=lambda *args: reason_of(lambda: plan(*args), args[0])
        ),
        ref=Backend("ref", lambda *args: reference(*args[:-1]), "a loop over groups", "torch"),
        family=f"{_NAME}_backward",
        describe=plan,
        indices=_indices,
    )


_BACKWARD_X = _operator(_OF_X)
_BACKWARD_WEIGHT = _operator(_OF_WEIGHT)


def _save(ctx: Any, args: tuple[Any, ...], outputs: Any) -> None:
    *tensors, ctx.backend = args
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None
    x, w, offsets = ctx.saved_tensors
    wants_x, wants_w = ctx.needs_input_grad[1:3]  # after the flag that says how to run
    if torch.is_grad_enabled():  # PyTorch's formulas can be differentiated again
        wanted = [tensor for tensor, wants in ((x, wants_x), (w, wants_w)) if wants]
        result = ref.grouped_gemm(x, w, offsets)
        found = iter(torch.autograd.grad(result, wanted, grad, create_graph=True))
        return next(found) if wants_x else None, next(found) if wants_w else None, None
    backend = ctx.backend if ctx.backend in ("sm90", "ref") else None
    return (
        _BACKWARD_X(grad, w, offsets, backend) if wants_x else None,
        _BACKWARD_WEIGHT(grad, x, offsets, backend) if wants_w else None,
        None,
    )


_OP = Op(
    _NAME,
    "(Tensor x, Tensor w, Tensor offsets, str? backend=None) -> Tensor",
    check=_check,
    fake=_output,
    sm90=Backend(
        "sm90", _sm90, *_CUTE, why_not=lambda *args: reason_of(lambda: _plan(*args), args[0])
    ),
    ref=Backend("ref", lambda *args: ref.grouped_gemm(*args[:-1]), "a loop over groups", "torch"),
    autograd=Autograd(_save, _backward),
    describe=_plan,
    load=_C.grouped_gemm_load,
    indices=_indices,
)


@_OP.export
def grouped_gemm(x: Tensor, w: Tensor, offsets: Tensor, *, backend: str | None = None) -> Tensor:
    """Each group of neighbouring rows times a matrix of its own: ``x[m] @ w[e].T`` for ``m`` from
    ``offsets[e]`` to ``offsets[e + 1]``.

    Sums are float32. Differentiable in ``x`` and ``w``. Works under torch.compile and
    torch.export, and in CUDA graphs; it never synchronises: the sizes of groups are read on the
    device, in the backward too.

    Args:
        x: ``[M, K]`` bfloat16 or float16. The precompiled kernels take K and N that are multiples
            of 8, rows at multiples of 16 bytes, and up to 512 groups; ref takes others.
        w: ``[E, N, K]``, the dtype of ``x``.
        offsets: ``[E + 1]`` int32 or int64, contiguous, not decreasing: where groups begin, and
            where the last one ends. Groups may be empty. An offset below 0 counts as 0, one
            beyond M as M; where offsets decrease, a row that several groups have gets the product
            of any of them, or zeros.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``[M, N]``, the dtype of ``x``; zeros for rows outside of all groups.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> offsets = torch.tensor([0, 100, 100, 256], dtype=torch.int32, device="cuda")
        >>> y = tiercel.grouped_gemm(x, w, offsets)  # 3 groups, the second one empty
    """
    result: Tensor = _OP(x, w, offsets, backend)
    return result
