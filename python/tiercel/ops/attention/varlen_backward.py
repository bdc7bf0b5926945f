# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention_varlen: one sequence after the other, by attention's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel._op import Backend, Op
from tiercel.core import platform
from tiercel.core.checks import check_dtype, check_same_device, check_shape
from tiercel.core.platform import Reason
from tiercel.ops.attention.backward import launch, plan_of
from tiercel.ops.attention.indices import packed_gradients_indices
from tiercel.ops.attention.reference import attention_varlen_backward as reference
from tiercel.ops.attention.reference import sequences

_NAME = "attention_varlen_backward"

# Below, `options` is (causal, window, scale, softcap).


def _split(has_lse_gradient: bool) -> Any:
    """(grad, q, k, v), starts, (out, lse, grad_lse or None), options, deterministic."""

    def split(args: tuple[Any, ...]) -> tuple[Any, ...]:
        results = (*args[6:8], args[8] if has_lse_gradient else None)
        rest = args[8 + has_lse_gradient : -1]
        return args[:4], args[4:6], results, rest[:4], rest[4]

    return split


def _check(tensors: Any, starts: Any, results: Any, *_: Any) -> None:
    grad, q, k, v = tensors
    out, lse, grad_lse = results
    for name, tensor, like in (("grad", grad, q), ("out", out, q), ("v", v, k)):
        check_dtype(_NAME, name, tensor.dtype, (q.dtype,))
        check_shape(_NAME, name, tensor, tuple(like.shape), "[T, H, D]")
        check_same_device(_NAME, name, tensor, "q", q)
    for name, tensor in (("lse", lse), ("grad_lse", grad_lse)):
        if tensor is not None:
            check_dtype(_NAME, name, tensor.dtype, (torch.float32,))
            check_shape(_NAME, name, tensor, (q.shape[1], q.shape[0]), "[H, Tq]")
            check_same_device(_NAME, name, tensor, "q", q)
    for name, tensor in zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True):
        check_dtype(_NAME, name, tensor.dtype, (torch.int32,))
        check_shape(_NAME, name, tensor, (starts[0].shape[0],), "[B + 1]")


def _of_one(tensors: Any, results: Any, queries: slice, keys: slice) -> tuple[Any, ...]:
    """A sequence's (grad, q, k, v, out, lse, grad_lse or None), as attention_backward has them."""
    rows = (queries, queries, keys, keys)
    given = [tensor[None, part] for tensor, part in zip(tensors, rows, strict=True)]
    out, *sums = results
    sums = [None if x is None else x[None, :, queries].contiguous() for x in sums]
    return (*given, out[None, queries], *sums)


def _sm90(
    tensors: Any, starts: Any, results: Any, options: tuple[Any, ...], deterministic: bool
) -> tuple[Tensor, ...]:
    found = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tensors[1:]]
    for queries, keys in sequences(*starts, len(tensors[1]), len(tensors[2])):
        if queries.start < queries.stop and keys.start < keys.stop and 0 not in tensors[1].shape:
            rows = (queries, keys, keys)
            parts = [whole[None, part] for whole, part in zip(found, rows, strict=True)]
            given = _of_one(tensors, results, queries, keys)
            launch(given, parts, options, deterministic)
    return tuple(found)


def _why_not(
    tensors: Any, starts: Any, results: Any, options: tuple[Any, ...], deterministic: bool
) -> Reason | None:
    reason = platform.why_not(tensors[1].device)
    if reason is not None or any(0 in x.shape for x in tensors):
        return reason
    try:
        # One row shows the strides.
        first = slice(0, 1)
        plan_of(_of_one(tensors, results, first, first), options, deterministic)
    except NotImplementedError as error:
        text = str(error).removeprefix("attention_backward: ")
        return Reason(NotImplementedError, text)
    return None


def _reference(
    tensors: Any, starts: Any, results: Any, options: tuple[Any, ...], _: bool
) -> tuple[Tensor, ...]:
    named = dict(zip(("causal", "window", "scale", "softcap"), options, strict=True))
    out, lse, grad_lse = results
    return reference(*tensors, *starts, out, lse, grad_lse=grad_lse, **named)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _operator(lse: bool) -> Op:
    split = _split(lse)
    return Op(
        f"{_NAME}_lse" if lse else _NAME,
        "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        f"Tensor out, Tensor lse, {'Tensor grad_lse, ' if lse else ''}bool causal=False, "
        "int[]? window=None, float? scale=None, float? softcap=None, bool deterministic=False, "
        "str? backend=None) -> (Tensor, Tensor, Tensor)",
        check=lambda *args: _check(*split(args)),
        fake=lambda grad, q, k, v, *_: (_like(q), _like(k), _like(v)),
        sm90=Backend(
            "sm90",
            lambda *args: _sm90(*split(args)),
            "attention_backward's kernels, one sequence after the other",
            "cute",
            why_not=lambda *args: _why_not(*split(args)),
        ),
        ref=Backend(
            "ref", lambda *args: _reference(*split(args)), "all scores in memory, float32", "torch"
        ),
        family=_NAME,
        indices=packed_gradients_indices,
    )


BACKWARD = _operator(False)
BACKWARD_LSE = _operator(True)
