# SPDX-License-Identifier: Apache-2.0
"""Attention over two sets of keys, from the attention over each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._op import Backend, Op
from tiercel.core import platform
from tiercel.core.checks import (
    check_contiguous,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
)
from tiercel.core.eager import empty
from tiercel.core.platform import Reason
from tiercel.ops.attention.reference import merge_attention_states as reference

__all__ = ["merge_attention_states"]

_NAME = "merge_attention_states"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *rest: Any) -> None:
    check_rank(_NAME, "out_a", out_a, 4)
    check_dtype(_NAME, "out_a", out_a.dtype, _DTYPES)
    batch, queries, heads, _ = out_a.shape
    results, sums = {"out_b": out_b}, {"lse_a": lse_a, "lse_b": lse_b}
    if len(rest) > 1:
        results["out"], sums["lse"] = rest[:2]
    for name, result in results.items():
        check_dtype(_NAME, name, result.dtype, (out_a.dtype,))
        check_shape(_NAME, name, result, tuple(out_a.shape), "[B, S, H, D]")
        check_same_device(_NAME, name, result, "out_a", out_a)
    for name, lse in sums.items():
        check_dtype(_NAME, name, lse.dtype, (torch.float32,))
        check_shape(_NAME, name, lse, (batch, heads, queries), "[B, H, S]")
        check_same_device(_NAME, name, lse, "out_a", out_a)
        check_contiguous(_NAME, name, lse)


def _outputs(out_a: Tensor, lse_a: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device),
        torch.empty(lse_a.shape, dtype=lse_a.dtype, device=lse_a.device),
    )


def _sm90(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, _: Any
) -> tuple[Tensor, Tensor]:
    out = empty(out_a, tuple(out_a.shape), out_a.dtype)
    lse = empty(out_a, tuple(lse_a.shape), torch.float32)
    _C.merge_attention_states(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


def _reference_into(*args: Any) -> None:
    out, lse = reference(*args[:4])
    args[4].copy_(out)
    args[5].copy_(lse)


def _plan(*args: Any) -> dict[str, Any]:
    return dict(_C.merge_attention_states_plan(*args[:4], *_outputs(*args)))


def _why_not(*args: Any) -> Reason | None:
    reason = platform.why_not(args[0].device)
    if reason is not None:
        return reason
    try:
        _plan(*args)
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).removeprefix(f"{_NAME}: "))
    return None


_CUDA = ("both results read once, in one launch", "cuda")
_TORCH = ("torch, step by step in float32", "torch")
_TENSORS = "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b"

_MERGE = Op(
    _NAME,
    f"({_TENSORS}, str? backend=None) -> (Tensor, Tensor)",
    check=lambda *args: _check(*args[:4]),
    fake=_outputs,
    sm90=Backend("sm90", _sm90, *_CUDA, why_not=_why_not),
    ref=Backend("ref", lambda *args: reference(*args[:4]), *_TORCH),
    describe=_plan,
    load=_C.merge_attention_states_load,
)

_MERGE_OUT = Op(
    f"{_NAME}_out",
    f"({_TENSORS}, Tensor(a!) out, Tensor(b!) lse, str? backend=None) -> ()",
    check=_check,
    fake=lambda *args: None,
    sm90=Backend(
        "sm90", lambda *args: _C.merge_attention_states(*args[:-1]), *_CUDA, why_not=_why_not
    ),
    ref=Backend("ref", _reference_into, *_TORCH),
    family=_NAME,
)


@_MERGE.export
def merge_attention_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """What attention over two disjoint sets of keys gives together, from the results over each.

    For a prefix that sequences share, chunks of a long prompt, keys on several GPUs:
    ``out = (out_a exp(lse_a) + out_b exp(lse_b)) / (exp(lse_a) + exp(lse_b))`` and ``lse``, the
    logarithm of the denominator, in float32. Where one of ``lse_a`` and ``lse_b`` is minus
    infinity (no keys), the other result is taken and what stands in this one does not count; where
    both are, the result is 0 and minus infinity.

    No gradient flows. Works under torch.compile and in CUDA graphs; it never synchronises.

    Args:
        out_a: ``[B, S, H, D]``, float32, bfloat16 or float16, as :func:`tiercel.attention` and
            :func:`tiercel.decode_attention` return it. The precompiled kernels take rows of whole
            16 bytes and strides that are multiples of 16 bytes.
        lse_a: ``[B, H, S]`` float32, contiguous: natural logarithms.
        out_b: As ``out_a``.
        lse_b: As ``lse_a``.
        out: ``(out, lse)`` to write to. ``out`` may be ``out_a`` or ``out_b``; ``lse`` has to be
            memory of its own.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``(out, lse)``, as ``out_a`` and ``lse_a``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> out, lse = tiercel.merge_attention_states(shared, shared_lse, own, own_lse)
    """
    if out is None:
        result: tuple[Tensor, Tensor] = _MERGE(out_a, lse_a, out_b, lse_b, backend)
        return result
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        got = f"{len(out)} values" if isinstance(out, (tuple, list)) else type(out).__name__
        raise TypeError(f"{_NAME}: `out` must be a pair (out, lse), got {got}")
    _MERGE_OUT(out_a, lse_a, out_b, lse_b, out[0], out[1], backend)
    return out[0], out[1]
