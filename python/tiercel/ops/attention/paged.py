# SPDX-License-Identifier: Apache-2.0
"""Attention of any number of queries a sequence over a paged cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tiercel import _C
from tiercel.core.op import Native, Op
from tiercel.core.spec import Spec
from tiercel.ops.attention import reference as ref
from tiercel.ops.attention import spec
from tiercel.ops.attention.indices import mixed_indices
from tiercel.ops.attention.options import Window, check_options, new_lse

__all__ = ["paged_attention"]

# The operator's arguments that the kernels' functions take.
_TENSORS = ("q", "k_cache", "v_cache", "page_table", "seqused_k", "cu_seqlens_q", "sinks")
_REST = (
    "max_seqlen_q",
    "k_scale",
    "v_scale",
    "out",
    "lse",
    *spec.OPTIONS,
    "max_seqused_k",
    "tree_mask",
    "prefix",
    "q_scale",
)


def _operator(declared: Spec) -> Op:
    results = declared.result_names
    return Op(
        declared,
        sm90=Native(
            _C.paged_attention,
            _C.paged_attention_plan,
            (*_TENSORS, *_REST),
            "as attention's; a copy per page, query heads of a key head in one tile, keys split "
            "among blocks; few new tokens: decode_attention's",
            language="cute",
            load=_C.paged_attention_load,
        ),
        reference=lambda call: ref.paged_attention(
            **declared.values(call), return_lse="lse" in results
        ),
        method="one sequence after the other, its keys gathered, all scores in memory, float32",
        indices=mixed_indices,
    )


_PAGED = _operator(spec.PAGED_ATTENTION)
_PAGED_LSE = _operator(spec.PAGED_ATTENTION_LSE)


@_PAGED.export
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    causal: bool = True,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    tree_mask: Tensor | None = None,
    prefix: Tensor | None = None,
    max_seqused_k: int | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of any number of new tokens of each sequence over a paged KV cache.

    A call may mix sequences with no new token, with one (decoding) and with many (prefill, or a
    chunk of it). Sequence b has the queries ``q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]]`` and
    ``seqused_k[b]`` keys. These include the new tokens' own keys, which must be in the cache
    already (:func:`tiercel.kv_cache_write`): key j is at slot ``j % page size`` of page
    ``page_table[b, j // page size]``. The last query is at the last key.

    A query that sees no key gets 0, and as ``lse`` minus infinity, or its head's sink. Rows of
    ``q`` before the first sequence or after the last one get 0 and minus infinity, so a batch may
    be padded to the size of a CUDA graph.

    Scores, softmax and sums are float32; probabilities are rounded to 16 bits before they multiply
    values, and the result is rounded once, or once more where keys are split among blocks.

    No gradient flows. Works under torch.compile and in CUDA graphs; it never synchronises and plans
    nothing on the host: lengths and pages stay on the GPU, and a graph's replay reads them again.
    No contents of ``page_table``, ``seqused_k`` and ``cu_seqlens_q`` make a kernel read or write
    outside of the tensors.

    Args:
        q: ``[Tq, H, D]``, bfloat16 or float16, or float8_e4m3fn with a float8_e4m3fn cache: then a
            kernel converts it to bfloat16, exactly, before the others. The precompiled kernels take
            D that is a multiple of 8 up to 512, and are fastest with 64 and 128; above 256 any D
            costs as much as 512. Strides, here and below, must be multiples of 16 bytes, with the
            last dimension contiguous.
        k_cache: ``[pages, page size, Hk, D]`` of the dtype of ``q`` or float8_e4m3fn. Hk divides H:
            query head h reads head h // (H // Hk). The precompiled kernels take page sizes that are
            powers of two, 1 included, a page stride that is a multiple of the row stride, and up to
            64 query heads per key head. With float8 and a D up to 256 that is no multiple of 16,
            all keys are copied to 16 bits at each call.
        v_cache: ``[pages, page size, Hk, Dv]``, as ``k_cache``. The precompiled kernels take a Dv
            other than D where both are up to 256, the cache has 16 bits and pages have 4 keys or
            more; tiles then have as many columns as the larger one needs.
        page_table: ``[B, pages of a sequence]`` int32, any strides. An entry that is not a page of
            the cache counts as its last page; entries for keys from ``seqused_k`` on are ignored.
        seqused_k: ``[B]`` int32, any stride: the number of keys of each sequence, clamped to 0 and
            to the table's capacity.
        cu_seqlens_q: ``[B + 1]`` int32, any stride: where each sequence starts in ``q``, then where
            the last one ends. It must not decrease.
        max_seqlen_q: An upper bound of the number of queries of a sequence; it selects the kernels.
            In a sequence with more queries, some rows may be 0.
        causal: Whether to mask the keys after a query's own.
        window: ``(left, right)``: how many keys before and after its own a query sees; None or -1
            is no limit.
        scale: Factor of the scores, positive; ``D ** -0.5`` by default.
        softcap: Scores s become ``softcap * tanh(s / softcap)``.
        sinks: ``[H]`` float32: for each head an additional score in the softmax's denominator,
            without a value, neither scaled nor capped; minus infinity means no sink.
        k_scale: float32, one element or Hk of them: factor of the stored keys; None is 1. For a
            float8 cache only.
        v_scale: The same for values.
        q_scale: float32, one element: factor of float8 queries; None is 1.
        tree_mask: ``[Tq]`` int64, any stride: for drafts that are trees. Bit j of a row says
            whether the query sees new token j of its sequence; it sees all keys before the new
            tokens. ``max_seqlen_q`` must be at most 64 and ``causal`` True. A window holds the last
            ``left + 1`` of the keys that a query sees. Bits of tokens that a sequence does not have
            are ignored. The op's page shows how to compute the mask from the ``parents`` of
            :func:`tiercel.verify_draft`.
        prefix: ``[B]`` int32, any stride: every query of a sequence sees the first ``prefix[b]`` of
            its keys, whatever ``causal`` and ``window`` say (prefix-LM). Must be None with
            ``tree_mask``. With many new tokens the precompiled kernels take no window that limits
            the keys before a query.
        max_seqused_k: An upper bound of ``seqused_k``, if the host knows one. It affects how keys
            are split among blocks, and how much memory 16-bit copies of a float8 cache take. If it
            is too small, keys of a float8 cache beyond it may be left out, and in the
            batch-invariant mode bits may depend on it.
        return_lse: Whether to return each row's log-sum-exp (natural logarithm) too; it includes
            the sinks.
        out: ``[Tq, H, Dv]`` to write to, of the dtype and on the device of the result.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[Tq, H, Dv]``, the dtype of ``q``, or bfloat16 for float8; with ``return_lse`` a pair of
        it and of ``[H, Tq]``, float32.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, device or option does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> out = tiercel.paged_attention(
        ...     q, k_cache, v_cache, page_table, seqused_k, cu_seqlens_q, max_seqlen_q
        ... )
    """
    limits = None
    if window is not None or scale is not None or softcap is not None or type(causal) is not bool:
        limits = check_options("paged_attention", causal, window, scale, softcap)
    if max_seqused_k is not None and (not isinstance(max_seqused_k, int) or max_seqused_k < 0):
        raise ValueError(
            "paged_attention: `max_seqused_k` must be None or a whole number, "
            f"got {max_seqused_k!r}"
        )
    given: tuple[Any, ...] = (
        *(q, k_cache, v_cache, page_table, seqused_k, cu_seqlens_q, max_seqlen_q),
        *(sinks, k_scale, v_scale, q_scale, tree_mask, prefix),
        *(causal, limits, scale, softcap, max_seqused_k, backend),
    )
    if out is None:
        op = _PAGED_LSE if return_lse else _PAGED
        return op.pick()(*given)  # type: ignore[no-any-return]
    if not return_lse:
        return _PAGED.into()(out, *given)  # type: ignore[no-any-return]
    return _PAGED_LSE.into()((out, new_lse(_PAGED, *given)), *given)  # type: ignore[no-any-return]
