# SPDX-License-Identifier: Apache-2.0
"""Attention of a few queries a sequence over a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
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
from tiercel.core.index_checks import Index
from tiercel.core.platform import Reason
from tiercel.ops.attention.checks import check_options
from tiercel.ops.attention.indices import paged_indices
from tiercel.ops.attention.reference import decode_attention as reference

__all__ = ["decode_attention"]

_NAME = "decode_attention"
_DTYPES = (torch.bfloat16, torch.float16)
_FLOAT8 = torch.float8_e4m3fn
_INPUTS = 5  # tensors that there always are

# Below, `inputs` is (q, k_cache, v_cache, page_table, seqused_k), `optional` (prefix, k_scale,
# v_scale) and `options` (causal, window, scale, softcap, max_seqused_k), as in the schemas.


def _check_lengths(name: str, tensor: Tensor, q: Tensor) -> None:
    check_dtype(_NAME, name, tensor.dtype, (torch.int32,))
    check_shape(_NAME, name, tensor, (q.shape[0],), "[B]")
    check_same_device(_NAME, name, tensor, "q", q)


def _check_scale(name: str, scale: Tensor, cache: Tensor) -> None:
    if cache.dtype != _FLOAT8:
        raise ValueError(
            f"{_NAME}: `{name}` must be None for a cache that is not float8, got a tensor"
        )
    check_dtype(_NAME, name, scale.dtype, (torch.float32,))
    if scale.numel() not in (1, cache.shape[2]):
        raise ValueError(
            f"{_NAME}: `{name}` must have 1 element or Hk = {cache.shape[2]}, got {scale.numel()}"
        )
    check_contiguous(_NAME, name, scale)


def _check(inputs: tuple[Tensor, ...], optional: tuple[Tensor | None, ...]) -> None:
    q, k_cache, v_cache, table, lengths = inputs
    check_rank(_NAME, "q", q, 4)
    check_dtype(_NAME, "q", q.dtype, _DTYPES)
    check_rank(_NAME, "k_cache", k_cache, 4)
    check_dtype(_NAME, "k_cache", k_cache.dtype, (q.dtype, _FLOAT8))
    check_dtype(_NAME, "v_cache", v_cache.dtype, (k_cache.dtype,))
    batch, _, heads, d = q.shape
    pages, places, kv_heads, _ = k_cache.shape
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        shape = (pages, places, kv_heads, d)
        check_shape(_NAME, name, cache, shape, "[pages, page size, Hk, D]")
        check_same_device(_NAME, name, cache, "q", q)
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"{_NAME}: `k_cache` must have a number of heads that divides that of `q`, {heads}, "
            f"got {kv_heads}"
        )
    check_dtype(_NAME, "page_table", table.dtype, (torch.int32,))
    check_rank(_NAME, "page_table", table, 2)
    shape = (batch, table.shape[1])
    check_shape(_NAME, "page_table", table, shape, "[B, pages of a sequence]")
    check_same_device(_NAME, "page_table", table, "q", q)
    _check_lengths("seqused_k", lengths, q)
    prefix, *scales = optional
    if prefix is not None:
        _check_lengths("prefix", prefix, q)
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if scale is not None:
            _check_scale(name, scale, k_cache)
            check_same_device(_NAME, name, scale, "q", q)


def _check_outputs(q: Tensor, out: Tensor, lse: Tensor | None) -> None:
    check_dtype(_NAME, "out", out.dtype, (q.dtype,))
    check_shape(_NAME, "out", out, tuple(q.shape), "[B, Sq, H, D]")
    check_same_device(_NAME, "out", out, "q", q)
    if lse is not None:
        check_dtype(_NAME, "lse", lse.dtype, (torch.float32,))
        check_shape(_NAME, "lse", lse, (q.shape[0], q.shape[2], q.shape[1]), "[B, H, Sq]")
        check_same_device(_NAME, "lse", lse, "q", q)
        check_contiguous(_NAME, "lse", lse)


def _indices(inputs: Any, optional: Any, options: Any) -> list[Index]:
    return paged_indices(inputs[1], *inputs[3:], optional[0], options[-1])


def _empty_lse(q: Tensor) -> Tensor:
    lse: Tensor = empty(q, (q.shape[0], q.shape[2], q.shape[1]), torch.float32)
    return lse


def _native(
    q: Tensor,
    causal: bool,
    window: Sequence[int] | None,
    scale: float | None,
    softcap: float | None,
    max_seqused_k: int | None,
) -> tuple[int, int, float, float, int, int]:
    """(left, right, scale, softcap, max_keys, split) as in kernels/attention/decode/decode.h."""
    left, right = (-1, -1) if window is None else window
    if scale is None:
        scale = float(max(q.shape[-1], 1)) ** -0.5
    keys = -1 if max_seqused_k is None else max_seqused_k
    return left, 0 if causal else right, scale, softcap or 0.0, keys, 0


def _reference(
    inputs: tuple[Tensor, ...],
    optional: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    return_lse: bool,
) -> Any:
    names = (
        "prefix",
        "k_scale",
        "v_scale",
        "causal",
        "window",
        "scale",
        "softcap",
        "max_seqused_k",
    )
    named = dict(zip(names, (*optional, *options), strict=True))
    return reference(*inputs, **named, return_lse=return_lse)


def _plan(
    inputs: tuple[Tensor, ...], optional: tuple[Tensor | None, ...], options: tuple[Any, ...]
) -> dict[str, Any]:
    q = inputs[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    native = _native(q, *options)
    return dict(_C.decode_attention_plan(*inputs, out, *optional, None, None, *native))


def _why_not(
    inputs: tuple[Tensor, ...], optional: tuple[Tensor | None, ...], options: tuple[Any, ...]
) -> Reason | None:
    reason = platform.why_not(inputs[0].device)
    if reason is not None:
        return reason
    try:
        _plan(inputs, optional, options)
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).removeprefix(f"{_NAME}: "))
    return None


_CUDA = ("mma.sync on keys and values as they come; clusters, or shares of all steps", "cuda")
_TORCH = ("all keys gathered, all scores in memory, float32", "torch")
_TENSORS = "Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor seqused_k"
_OPTIONS = (
    "Tensor? prefix=None, Tensor? k_scale=None, Tensor? v_scale=None, bool causal=True, "
    "int[]? window=None, float? scale=None, float? softcap=None, SymInt? max_seqused_k=None, "
    "str? backend=None"
)


def _operator(lse: bool) -> Op:
    launch: Any = _C.decode_attention_new_lse if lse else _C.decode_attention_new

    def split(args: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        return args[:_INPUTS], args[_INPUTS : _INPUTS + 3], args[_INPUTS + 3 : -1]

    def fake(q: Tensor, *_: Any) -> Any:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if not lse:
            return out
        shape = (q.shape[0], q.shape[2], q.shape[1])
        return out, torch.empty(shape, dtype=torch.float32, device=q.device)

    return Op(
        f"{_NAME}_lse" if lse else _NAME,
        f"({_TENSORS}, {_OPTIONS}) -> {'(Tensor, Tensor)' if lse else 'Tensor'}",
        check=lambda *args: _check(*split(args)[:2]),
        fake=fake,
        sm90=Backend(
            "sm90",
            lambda *args: launch(*args[:-1]),
            *_CUDA,
            why_not=lambda *args: _why_not(*split(args)),
        ),
        ref=Backend("ref", lambda *args: _reference(*split(args), lse), *_TORCH),
        family=_NAME,
        indices=lambda *args: _indices(*split(args)),
        describe=lambda *args: _plan(*split(args)),
        load=None if lse else _C.decode_attention_load,
        launch=launch,
    )


def _out_operator(lse: bool) -> Op:
    launch: Any = _C.decode_attention_out_lse if lse else _C.decode_attention_out
    first = _INPUTS + (2 if lse else 1)

    def split(args: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        return args[:_INPUTS], args[first : first + 3], args[first + 3 : -1]

    def outputs(args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
        return args[_INPUTS], args[_INPUTS + 1] if lse else None

    def check(*args: Any) -> None:
        _check(*split(args)[:2])
        _check_outputs(args[0], *outputs(args))

    def run_reference(*args: Any) -> None:
        results = _reference(*split(args), True)
        for given, result in zip(outputs(args), results, strict=True):
            if given is not None:
                given.copy_(result)

    return Op(
        f"{_NAME}_lse_out" if lse else f"{_NAME}_out",
        f"({_TENSORS}, Tensor(a!) out, {'Tensor(b!) lse, ' if lse else ''}{_OPTIONS}) -> ()",
        check=check,
        fake=lambda *args: None,
        sm90=Backend(
            "sm90",
            lambda *args: launch(*args[:-1]),
            *_CUDA,
            why_not=lambda *args: _why_not(*split(args)),
        ),
        ref=Backend("ref", run_reference, *_TORCH),
        family=_NAME,
        indices=lambda *args: _indices(*split(args)),
        launch=launch,
    )


_DECODE = _operator(False)
_DECODE_LSE = _operator(True)
_DECODE_OUT = _out_operator(False)
_DECODE_LSE_OUT = _out_operator(True)


@_DECODE.export
def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seqused_k: Tensor,
    *,
    prefix: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: bool = True,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    max_seqused_k: int | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the last few tokens of each sequence over its keys and values in pages.

    What :func:`tiercel.attention` computes, with key j of sequence b at place ``j % page size`` of
    page ``page_table[b, j // page size]``. The keys of the queries themselves are in the cache
    already (:func:`tiercel.kv_cache_write`): query i of Sq stands at key
    ``seqused_k[b] - Sq + i``. A query that sees no key gets 0, and minus infinity as its ``lse``.

    Scores, softmax and sums are float32; probabilities are rounded to 16 bits before they multiply
    values, and the result is rounded once. With a float8 cache the products are of float16: queries
    are scaled by powers of two, so bfloat16 ones lose nothing.

    No gradient flows. Works under torch.compile and in CUDA graphs; it never synchronises: lengths
    stay on the GPU, and how work is split follows from them there.

    The method is FlashAttention's online softmax with split keys (Flash-Decoding, Dao et al. 2023).

    Args:
        q: ``[B, Sq, H, D]``, bfloat16 or float16. The precompiled kernels take D that is a multiple
            of 8 up to 256, of 16 with a float8 cache, and are fastest with 64 and 128; any strides
            that are multiples of 16 bytes with the last dimension contiguous, here and below.
        k_cache: ``[pages, page size, Hk, D]`` of the dtype of ``q`` or float8_e4m3fn. Hk divides H:
            query head h reads head h // (H // Hk). The precompiled kernels take page sizes that
            are powers of two, 1 included.
        v_cache: The same.
        page_table: ``[B, pages of a sequence]`` int32, any strides. An entry that is no page of the
            cache counts as its last page; those of keys from ``seqused_k`` on have no meaning.
        seqused_k: ``[B]`` int32, any stride: the keys of each sequence, 0 included, which gives
            rows of 0; more than the table has room for counts as that, less than 0 as 0.
        prefix: ``[B]`` int32, any stride: that many first keys are seen by all queries, whatever
            the causal mask and the window say (prefix-LM; with a window, attention sinks).
        k_scale: float32, one element or Hk of them: what stored keys are multiplied by; None is 1.
            For float8 only.
        v_scale: The same for values.
        causal: Whether a query sees no key after its own, of those of the prefix apart.
        window: ``(left, right)``: how many keys before and after its own a query sees; None or -1
            is no limit.
        scale: What scores are multiplied by, positive; ``D ** -0.5`` by default.
        softcap: Scores s become ``softcap * tanh(s / softcap)``.
        max_seqused_k: An upper bound of ``seqused_k``, if the host knows one: it helps to choose
            how the work is split, and changes nothing else.
        return_lse: Whether to return the natural logarithms of the rows' sums of exponentials too.
        out: ``[B, Sq, H, D]`` to write to, of the dtype and on the device of ``q``.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``[B, Sq, H, D]``, the dtype of ``q``; with ``return_lse`` a pair of it and of
        ``[B, H, Sq]``, float32.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, device or option does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> out = tiercel.decode_attention(q, k_cache, v_cache, page_table, seqused_k)
    """
    limits = None
    if window is not None or scale is not None or softcap is not None or type(causal) is not bool:
        limits = check_options(causal, window, scale, softcap, _NAME)
    if max_seqused_k is not None and (not isinstance(max_seqused_k, int) or max_seqused_k < 0):
        raise ValueError(
            f"{_NAME}: `max_seqused_k` must be None or a whole number, got {max_seqused_k!r}"
        )
    options = (prefix, k_scale, v_scale, causal, limits, scale, softcap, max_seqused_k, backend)
    inputs = (q, k_cache, v_cache, page_table, seqused_k)
    if out is None:
        result: Tensor | tuple[Tensor, Tensor] = (_DECODE_LSE if return_lse else _DECODE)(
            *inputs, *options
        )
        return result
    if not return_lse:
        _DECODE_OUT(*inputs, out, *options)
        return out
    if not isinstance(q, Tensor) or q.dim() != 4:
        _check(inputs, (prefix, k_scale, v_scale))
    lse = _empty_lse(q)
    _DECODE_LSE_OUT(*inputs, out, lse, *options)
    return out, lse
