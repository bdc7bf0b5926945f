# SPDX-License-Identifier: Apache-2.0
"""Attention of a few queries a sequence over a paged cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tiercel import _C
from tiercel.core.op import Native, Op
from tiercel.core.spec import Spec
from tiercel.ops.attention import reference as ref
from tiercel.ops.attention import spec
from tiercel.ops.attention.indices import paged_indices
from tiercel.ops.attention.options import Window, check_options, native_options, new_lse

__all__ = ["decode_attention"]

_INPUTS = ("q", "k_cache", "v_cache", "page_table", "seqused_k")
_REST = spec.DECODE_ATTENTION.names[len(_INPUTS) :]


def _plan(*values: Any) -> dict[str, Any]:
    """`_C.decode_attention_plan`, of the operator's arguments."""
    inputs, optional, options = values[:5], values[5:8], values[8:12]
    out, most = inputs[0].new_empty(inputs[0].shape), values[12]
    native = (*native_options(inputs[0], *options), -1 if most is None else most, 0)
    return dict(_C.decode_attention_plan(*inputs, out, *optional, None, None, *native))


def _operator(declared: Spec, run: Any, run_out: Any) -> Op:
    results = declared.result_names
    return Op(
        declared,
        sm90=Native(
            run,
            _plan,
            declared.names,
            "mma.sync on keys and values as they come; clusters, or shares of all steps",
            load=_C.decode_attention_load,
            returns=True,
            run_out=run_out,
            takes_out=(*_INPUTS, *results, *_REST),
        ),
        reference=lambda call: ref.decode_attention(
            **declared.values(call), return_lse="lse" in results
        ),
        method="all keys gathered, all scores in memory, float32",
        indices=paged_indices,
    )


_DECODE = _operator(spec.DECODE_ATTENTION, _C.decode_attention_new, _C.decode_attention_out)
_DECODE_LSE = _operator(
    spec.DECODE_ATTENTION_LSE, _C.decode_attention_new_lse, _C.decode_attention_out_lse
)


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
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    max_seqused_k: int | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the last few tokens of each sequence over a paged KV cache.

    Computes :func:`tiercel.attention`, with key j of sequence b at slot ``j % page size`` of page
    ``page_table[b, j // page size]``. The new tokens' own keys must be in the cache already
    (:func:`tiercel.kv_cache_write`): query i of Sq is at key position ``seqused_k[b] - Sq + i``. A
    query that sees no key gets 0, and minus infinity as ``lse``.

    Scores, softmax and sums are float32; probabilities are rounded to 16 bits before they multiply
    values, and the result is rounded once. With a float8 cache the products are computed in
    float16: bfloat16 queries are scaled by powers of two, so they lose nothing.

    No gradient flows. Works under torch.compile and in CUDA graphs; it never synchronises: lengths
    stay on the GPU, where the kernel splits the work by them.

    The method is FlashAttention's online softmax with split keys (Flash-Decoding, Dao et al. 2023).

    Args:
        q: ``[B, Sq, H, D]``, bfloat16 or float16. The precompiled kernels take D that is a multiple
            of 8 up to 256, of 16 with a float8 cache, and are fastest with 64 and 128; any strides
            that are multiples of 16 bytes with the last dimension contiguous, here and below.
        k_cache: ``[pages, page size, Hk, D]`` of the dtype of ``q`` or float8_e4m3fn. Hk divides H:
            query head h reads head h // (H // Hk). The precompiled kernels take page sizes that
            are powers of two, 1 included.
        v_cache: The same.
        page_table: ``[B, pages of a sequence]`` int32, any strides. An entry that is not a page of
            the cache counts as its last page; entries for keys from ``seqused_k`` on are ignored.
        seqused_k: ``[B]`` int32, any stride: the number of keys of each sequence; 0 gives rows of
            0. A length is clamped to 0 and to the table's capacity.
        prefix: ``[B]`` int32, any stride: the number of first keys that all queries see, whatever
            the causal mask and the window (prefix-LM; with a window, attention sinks).
        k_scale: float32, one element or Hk of them: factor of the stored keys; None is 1. For
            float8 only.
        v_scale: The same for values.
        causal: Whether to mask the keys after a query's own, except those of the prefix.
        window: ``(left, right)``: how many keys before and after its own a query sees; None or -1
            is no limit.
        scale: Factor of the scores, positive; ``D ** -0.5`` by default.
        softcap: Scores s become ``softcap * tanh(s / softcap)``.
        max_seqused_k: An upper bound of ``seqused_k``, if the host knows one. It only affects how
            the work is split.
        return_lse: Whether to return each row's log-sum-exp (natural logarithm) too.
        out: ``[B, Sq, H, D]`` to write to, of the dtype and on the device of ``q``.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[B, Sq, H, D]``, the dtype of ``q``; with ``return_lse`` a pair of it and of
        ``[B, H, Sq]``, float32.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, device or option does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> out = tiercel.decode_attention(q, k_cache, v_cache, page_table, seqused_k)
    """
    limits = None
    if window is not None or scale is not None or softcap is not None or type(causal) is not bool:
        limits = check_options("decode_attention", causal, window, scale, softcap)
    if max_seqused_k is not None and (not isinstance(max_seqused_k, int) or max_seqused_k < 0):
        raise ValueError(
            "decode_attention: `max_seqused_k` must be None or a whole number, "
            f"got {max_seqused_k!r}"
        )
    given: tuple[Any, ...] = (
        *(q, k_cache, v_cache, page_table, seqused_k, prefix, k_scale, v_scale),
        *(causal, limits, scale, softcap, max_seqused_k, backend),
    )
    if out is None:
        op = _DECODE_LSE if return_lse else _DECODE
        return op.pick()(*given)  # type: ignore[no-any-return]
    if not return_lse:
        return _DECODE.into()(out, *given)  # type: ignore[no-any-return]
    return _DECODE_LSE.into()((out, new_lse(_DECODE, *given)), *given)  # type: ignore[no-any-return]
