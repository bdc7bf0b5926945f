# SPDX-License-Identifier: Apache-2.0
"""What attention's operators ask of their arguments, and what they return."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tiercel.core.checks import (
    check_bool,
    check_contiguous,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
)

_NAME = "attention"
DTYPES = (torch.bfloat16, torch.float16)
FLOAT8 = torch.float8_e4m3fn
Window = Sequence["int | None"]
OPTIONS = (
    "bool causal=False, int[]? window=None, float? scale=None, float? softcap=None, "
    "str? backend=None"
)


def _limit(op: str, value: object) -> int:
    if value is None:
        return -1
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{op}: `window` must hold whole numbers or None, got {value!r}")
    return value


def _check_positive(op: str, name: str, value: float) -> None:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise ValueError(f"{op}: `{name}` must be None or positive and finite, got {value!r}")


def check_options(
    causal: bool,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
    op: str = _NAME,
) -> list[int] | None:
    """Raises for a wrong one; the window as the operators take it."""
    check_bool(op, "causal", causal)
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None:
            _check_positive(op, name, value)
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"{op}: `window` must be None or (left, right), got {window!r}")
    return [_limit(op, window[0]), _limit(op, window[1])]


def check_tensors(
    dtypes: Sequence[torch.dtype],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None = None,
) -> None:
    """Of an operator for these dtypes; a wrong one's message names all that there are."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rank(_NAME, name, tensor, 4)
    every = (*DTYPES, FLOAT8)
    check_dtype(_NAME, "q", q.dtype, dtypes if q.dtype in every else every)
    batch, _, heads, d = q.shape
    _, keys, kv_heads, _ = k.shape
    for name, tensor in (("k", k), ("v", v)):
        check_dtype(_NAME, name, tensor.dtype, (q.dtype,))
        check_shape(_NAME, name, tensor, (batch, keys, kv_heads, d), "[B, Sk, Hk, D]")
        check_same_device(_NAME, name, tensor, "q", q)
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"{_NAME}: `k` must have a number of heads that divides that of `q`, {heads}, "
            f"got {kv_heads}"
        )
    if out is not None:
        check_dtype(_NAME, "out", out.dtype, (result_dtype(q),))
        check_shape(_NAME, "out", out, tuple(q.shape), "[B, Sq, H, D]")
        check_same_device(_NAME, "out", out, "q", q)


def check_out(
    dtypes: Sequence[torch.dtype],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    check_tensors(dtypes, q, k, v, out)
    if lse is not None:
        check_dtype(_NAME, "lse", lse.dtype, (torch.float32,))
        check_shape(_NAME, "lse", lse, (q.shape[0], q.shape[2], q.shape[1]), "[B, H, Sq]")
        check_same_device(_NAME, "lse", lse, "q", q)
        check_contiguous(_NAME, "lse", lse)


def result_dtype(q: Tensor) -> torch.dtype:
    return torch.bfloat16 if q.dtype == FLOAT8 else q.dtype


def empty_out(q: Tensor) -> Tensor:
    return torch.empty(q.shape, dtype=result_dtype(q), device=q.device)


def empty_lse(q: Tensor) -> Tensor:
    shape = (q.shape[0], q.shape[2], q.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def check_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *_: Any,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> None:
    """Of packed sequences; raises for a wrong one."""
    op = "attention_varlen"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rank(op, name, tensor, 3)
    check_dtype(op, "q", q.dtype, dtypes)
    heads, d = q.shape[1:]
    keys, kv_heads, _ = k.shape
    for name, tensor in (("k", k), ("v", v)):
        check_dtype(op, name, tensor.dtype, (q.dtype,))
        check_shape(op, name, tensor, (keys, kv_heads, d), "[Tk, Hk, D]")
        check_same_device(op, name, tensor, "q", q)
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"{op}: `k` must have a number of heads that divides that of `q`, {heads}, "
            f"got {kv_heads}"
        )
    check_rank(op, "cu_seqlens_q", cu_seqlens_q, 1)
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_dtype(op, name, starts.dtype, (torch.int32,))
        check_shape(op, name, starts, (cu_seqlens_q.shape[0],), "[B + 1]")
        check_same_device(op, name, starts, "q", q)
    if cu_seqlens_q.shape[0] == 0:
        raise ValueError(f"{op}: `cu_seqlens_q` must have at least one element, got none")
    if max_seqlen_q < 0 or max_seqlen_k < 0:
        raise ValueError(
            f"{op}: `max_seqlen_q` and `max_seqlen_k` must be at least 0, "
            f"got {max_seqlen_q} and {max_seqlen_k}"
        )


def no_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *_: Any,
) -> bool:
    """True if no query of packed sequences sees a key, so that there is nothing to compute."""
    empty = cu_seqlens_q.shape[:1] == (1,) or k.shape[0] == 0
    return bool(empty or max_seqlen_q == 0 or max_seqlen_k == 0)
