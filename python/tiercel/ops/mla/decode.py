# SPDX-License-Identifier: Apache-2.0
"""Attention of absorbed queries over a paged cache of latents."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.index_checks import Index
from tiercel.core.op import Native, Op
from tiercel.core.spec import Call, Spec
from tiercel.ops.attention.indices import paged_indices
from tiercel.ops.mla import reference as ref
from tiercel.ops.mla import spec

__all__ = ["mla_decode"]


_TENSORS = tuple(tensor.name for tensor in spec.MLA_DECODE.tensors)


def _indices(call: Call) -> list[Index]:
    paged = {name: getattr(call, name) for name in ("page_table", "seqused_k")}
    return paged_indices(Call(k_cache=call.kv_cache, max_seqused_k=None, **paged))


def _operator(declared: Spec) -> Op:
    results = declared.result_names
    return Op(
        declared,
        sm90=Native(
            _C.mla_decode_run,
            _C.mla_decode_plan,
            (*_TENSORS, "out", "lse", "scale", "d_v"),
            "wgmma on 64 rows, each key loaded once for both products; equal shares of all keys",
            load=_C.mla_decode_load,
        ),
        reference=lambda call: ref.mla_decode(**declared.values(call), return_lse="lse" in results),
        method="all keys gathered, all scores in memory, float32",
        indices=_indices,
    )


_DECODE = _operator(spec.MLA_DECODE)
_DECODE_LSE = _operator(spec.MLA_DECODE_LSE)


@_DECODE.export
def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seqused_k: Tensor,
    scale: float,
    *,
    d_v: int = 512,
    kv_scale: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head latent attention of the last few tokens of each sequence over cached latents.

    For queries that have absorbed the keys' up-projection (DeepSeek-V2, arXiv:2405.04434): all
    heads share one row per token, which holds a latent and then the rotary part of the key. The row
    is the key, and its first ``d_v`` columns are the value; the values' up-projection comes after.

    Key j of sequence b is at slot ``j % page size`` of page ``page_table[b, j // page size]``. The
    new tokens' own rows must be in the cache already (:func:`tiercel.mla_cache_write`): query i of
    Sq is at key position ``seqused_k[b] - Sq + i`` and sees no key after that. A query that sees no
    key gets 0, and minus infinity as ``lse``.

    Scores, softmax and sums are float32; probabilities are rounded to 16 bits before they multiply
    values, and the result is rounded once.

    No gradient flows. Works under torch.compile and in CUDA graphs; it never synchronises and plans
    nothing on the host: lengths and pages stay on the GPU, a graph's replay reads them again, and
    the kernel splits the work by them. No contents of ``page_table`` and ``seqused_k`` make a
    kernel read or write outside of the tensors.

    Args:
        q: ``[B, Sq, H, D]``, bfloat16 or float16: ``d_v`` columns that belong to the latent, then
            the rotary ones. The precompiled kernels take D = 576, Sq * H up to 65535, and strides
            that are multiples of 16 bytes, with the last dimension contiguous.
        kv_cache: ``[pages, page size, D]`` of the dtype of ``q``, or float8_e4m3fn; or
            ``[pages, page size, 656]`` uint8 for bfloat16 queries: 512 float8, 4 float32 scales of
            128 of them each, 64 bfloat16. The precompiled kernels take page sizes that are powers
            of two, and rows that start at multiples of 16 bytes; with 16 bits the page stride must
            be a multiple of the row stride.
        page_table: ``[B, pages of a sequence]`` int32, any strides. An entry that is not a page of
            the cache counts as its last page; entries for keys from ``seqused_k`` on are ignored.
        seqused_k: ``[B]`` int32, any stride: the number of keys of each sequence, clamped to 0 and
            to the table's capacity.
        scale: Factor of the scores, positive: ``192 ** -0.5`` for DeepSeek-V3 without YaRN, from
            the head dimension before absorption.
        d_v: The number of columns of a value; the precompiled kernels take 512.
        kv_scale: ``[1]`` float32: factor of a float8 row; None is 1.
        return_lse: Whether to return each row's log-sum-exp (natural logarithm) too.
        out: ``[B, Sq, H, d_v]`` to write to, of the dtype and on the device of ``q``.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[B, Sq, H, d_v]``, the dtype of ``q``; with ``return_lse`` a pair of it and of
        ``[B, H, Sq]``, float32.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, device or option does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> out = tiercel.mla_decode(q, kv_cache, page_table, seqused_k, scale=192**-0.5)
    """
    given = (q, kv_cache, page_table, seqused_k, scale, kv_scale, d_v, backend)
    op = _DECODE_LSE if return_lse else _DECODE
    if out is None:
        return op.pick()(*given)  # type: ignore[no-any-return]
    if not return_lse:
        return op.into()(out, *given)  # type: ignore[no-any-return]
    if not isinstance(q, Tensor) or q.dim() != 4:
        op.operator.check(*given)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return op.into()((out, lse), *given)  # type: ignore[no-any-return]
