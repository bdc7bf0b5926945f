# SPDX-License-Identifier: Apache-2.0
"""The declarations of reduce and reduce_sum."""

from __future__ import annotations

import math
from typing import Any

from tiercel.core.spec import FLOATS, Bool, Call, DType, Int, Numerics, Spec, Str, Tensor

MAXIMA = ("max", "amax")


def shape_left(x: Any, dim: int | None, keepdim: bool) -> tuple[int, ...]:
    """The shape of the result."""
    sizes = tuple(x.shape)  # torch's own are slow to cut
    if dim is None:
        return (1,) * len(sizes) if keepdim else ()
    dim %= len(sizes)
    return (*sizes[:dim], 1, *sizes[dim + 1 :]) if keepdim else sizes[:dim] + sizes[dim + 1 :]


def _shape(call: Call) -> tuple[int, ...]:
    return shape_left(call.x, call.dim, call.keepdim)


def _check(call: Call) -> None:
    x, dim = call.x, call.dim
    if dim is not None and not -x.dim() <= dim < x.dim():
        raise ValueError(f"reduce: `dim` must be from {-x.dim()} to {x.dim() - 1}, got {dim}")
    if call.op in MAXIMA:
        empty = x.numel() == 0 if dim is None else x.shape[dim] == 0
        if empty and math.prod(_shape(call)) > 0:
            where = "" if dim is None else f" in dimension {dim % x.dim()}"
            raise ValueError(
                f"reduce: `x` must not be empty{where} for a maximum, got shape {list(x.shape)}"
            )


_X = Tensor("x", "... N", FLOATS, strided=True)
_DIM = Int("dim", None, optional=True)
_KEEPDIM = Bool("keepdim", False)
_DTYPE = DType("dtype", None, optional=True, choices=("x", "float32"))
# The result's rounding, and float32 sums of positive numbers.
_RESULT = Tensor(
    *("out", "*", ("dtype", "x")),
    shape=_shape,
    shape_text="what is left of `x`",
    rtol=4e-3,
    atol=1e-5,
)

REDUCE = Spec(
    "reduce",
    _X,
    _DIM,
    Str("op", "sum", choices=("sum", "mean", *MAXIMA)),
    _KEEPDIM,
    _DTYPE,
    results=[_RESULT],
    check=_check,
    limits="at most two dimensions after merging contiguous ones",
    numerics=Numerics(
        4e-6,
        of="terms",
        sums="float32: lanes, then warps and blocks; maxima are exact",
        batch_invariant=False,
        varies="how many threads and blocks share a row, which is chosen by the shape",
    ),
)
REDUCE_SUM = Spec(
    "reduce_sum",
    _X,
    _DIM,
    _KEEPDIM,
    _DTYPE,
    results=[_RESULT],
    limits="as `reduce`",
    numerics=Numerics(
        4e-6, of="terms", sums="as `reduce`", batch_invariant=False, varies="as `reduce`"
    ),
)
