# SPDX-License-Identifier: Apache-2.0
"""The options that all attention ops have: their checks, and their form for the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tiercel.core.checks import check_bool
from tiercel.core.op import Op

Window = Sequence["int | None"]


def _limit(op: str, value: object) -> int:
    if value is None:
        return -1
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{op}: `window` must hold whole numbers or None, got {value!r}")
    return value


def check_options(
    op: str, causal: bool, window: Window | None, scale: float | None, softcap: float | None
) -> list[int] | None:
    """Raises for a wrong one; returns the window as the operators take it."""
    check_bool(op, "causal", causal)
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is None:
            continue
        if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            raise ValueError(f"{op}: `{name}` must be None or positive and finite, got {value!r}")
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"{op}: `window` must be None or (left, right), got {window!r}")
    return [_limit(op, window[0]), _limit(op, window[1])]


def native_options(
    q: Tensor,
    causal: bool,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[int, int, float, float]:
    """(left, right, scale, softcap) as in kernels/attention/common/options.h."""
    left, right = (-1, -1) if window is None else window
    if scale is None:
        scale = float(max(q.shape[-1], 1)) ** -0.5
    return left, 0 if causal else right, scale, softcap or 0.0  # type: ignore[return-value]


def empty_lse(q: Tensor) -> Tensor:
    """For ``[B, S, H, D]`` it is ``[B, H, S]``, for ``[T, H, D]`` ``[H, T]``."""
    *batch, rows, heads, _ = q.shape
    return q.new_empty((*batch, heads, rows), dtype=torch.float32)


def new_lse(op: Op, q: Tensor, *rest: Any) -> Tensor:
    """The `lse` of a call that gives only `out`."""
    if not isinstance(q, Tensor) or q.dim() < 3:
        op.operator.check(q, *rest)
    return empty_lse(q)
