# SPDX-License-Identifier: Apache-2.0
"""Grouped products: rows in groups, each group with a matrix of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._checks import (
    check_contiguous,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
)
from tiercel._op import Backend, Op
from tiercel.ops.moe_choice import block_size
from tiercel.ops.moe_halves import DTYPES, NO_IDS, NO_SCALES, empty_routing, reason_of
from tiercel.ops.routing_align import align_plan, align_sm90
from tiercel.ref import moe as ref

__all__ = ["grouped_gemm"]

_NAME = "grouped_gemm"


def _check(x: Tensor, w: Tensor, offsets: Tensor, backend: str | None) -> None:
    check_rank(_NAME, "x", x, 2)
    check_dtype(_NAME, "x", x.dtype, DTYPES)
    check_rank(_NAME, "w", w, 3)
    check_dtype(_NAME, "w", w.dtype, (x.dtype,))
    check_shape(_NAME, "w", w, (*w.shape[:2], x.shape[1]), "[E, N, K]")
    check_rank(_NAME, "offsets", offsets, 1)
    check_dtype(_NAME, "offsets", offsets.dtype, (torch.int32, torch.int64))
    check_shape(_NAME, "offsets", offsets, (w.shape[0] + 1,), "[E + 1]")
    check_contiguous(_NAME, "offsets", offsets)
    for name, tensor in (("w", w), ("offsets", offsets)):
        check_same_device(_NAME, name, tensor, "x", x)


def _output(x: Tensor, w: Tensor, *_: Any) -> Tensor:
    return torch.empty((x.shape[0], w.shape[1]), dtype=x.dtype, device=x.device)


def _sm90(x: Tensor, w: Tensor, offsets: Tensor, backend: str | None) -> Tensor:
    rows, groups = x.shape[0], w.shape[0]
    out = x.new_zeros((rows, w.shape[1]))  # of rows outside of all groups
    if rows == 0 or groups == 0:
        return out
    # A row's group, as the router of a token with one expert gives it; -1 or E outside of all.
    number = torch.arange(rows, dtype=offsets.dtype, device=x.device)
    ids = torch.bucketize(number, offsets, right=True, out_int32=True).sub_(1).view(rows, 1)
    block = block_size(rows, groups)
    routing = align_sm90(ids, block, groups, None, False, False, None)
    _C.moe_down(x, w, *routing, None, out, block, 0, *NO_IDS, *NO_SCALES)
    return out


def _plan(x: Tensor, w: Tensor, *_: Any) -> dict[str, Any]:
    block = block_size(x.shape[0], w.shape[0])
    ids = torch.empty((0, 1), dtype=torch.int32, device=x.device)
    align_plan(ids, block, w.shape[0], None, False, False, None)  # it has to take so many groups
    routing = empty_routing(x, x.shape[0], w.shape[0], block)
    out = _output(x, w)
    return dict(_C.moe_down_plan(x, w, *routing, None, out, block, 0, *NO_IDS, *NO_SCALES))


_OP = Op(
    _NAME,
    "(Tensor x, Tensor w, Tensor offsets, str? backend=None) -> Tensor",
    check=_check,
    fake=_output,
    sm90=Backend(
        "sm90",
        _sm90,
        "moe_down's kernel: blocks of a group's rows times tiles of its matrix",
        "cute",
        why_not=lambda *args: reason_of(lambda: _plan(*args), args[0]),
    ),
    ref=Backend("ref", lambda *args: ref.grouped_gemm(*args[:-1]), "a loop over groups", "torch"),
    describe=_plan,
    load=_C.moe_load,
)


@_OP.export
def grouped_gemm(x: Tensor, w: Tensor, offsets: Tensor, *, backend: str | None = None) -> Tensor:
    """Each group of neighbouring rows times a matrix of its own: ``x[m] @ w[e].T`` for ``m`` from
    ``offsets[e]`` to ``offsets[e + 1]``.

    Sums are float32. There is no derivative. Works under torch.compile and torch.export, and in
    CUDA graphs; it never synchronises: the sizes of groups are read on the device.

    Args:
        x: ``[M, K]`` bfloat16 or float16. The precompiled kernels take K and N that are multiples
            of 8, rows at multiples of 16 bytes, and up to 512 groups; ref takes others.
        w: ``[E, N, K]``, the dtype of ``x``.
        offsets: ``[E + 1]`` int32 or int64, contiguous, not decreasing: where groups begin, and
            where the last one ends. Groups may be empty.
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
