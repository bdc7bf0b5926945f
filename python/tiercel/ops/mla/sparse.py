# SPDX-License-Identifier: Apache-2.0
"""Attention of absorbed queries over listed rows of a latent cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.index_checks import Index, places
from tiercel.core.op import Native, Op
from tiercel.core.spec import Call, Spec
from tiercel.ops.mla import reference as ref
from tiercel.ops.mla import spec

__all__ = ["mla_sparse_attention"]

_TENSORS = tuple(tensor.name for tensor in spec.MLA_SPARSE.tensors)


def _indices(call: Call) -> list[Index]:
    return [places("indices", call.indices, math.prod(call.kv_cache.shape[:2]))]


def _operator(declared: Spec) -> Op:
    whole = "lse" in declared.result_names
    return Op(
        declared,
        sm90=Native(
            _C.mla_sparse_attention_run,
            _C.mla_sparse_attention_plan,
            (*_TENSORS, "out", "lse", "scale", "d_v"),
            "wgmma on 64 heads, two warpgroups that take turns; equal shares of all entries",
            load=_C.mla_sparse_attention_load,
        ),
        reference=lambda call: ref.mla_sparse_attention(**declared.values(call), return_lse=whole),
        method="all keys gathered, all scores in memory, float32",
        indices=_indices,
    )


_SPARSE = _operator(spec.MLA_SPARSE)
_SPARSE_LSE = _operator(spec.MLA_SPARSE_LSE)


@_SPARSE.export
def mla_sparse_attention(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    scale: float,
    *,
    d_v: int = 512,
    kv_scale: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head latent attention of each query over a given list of cached tokens.

    DeepSeek sparse attention, for decoding and prefill alike: queries have absorbed the keys'
    up-projection as for :func:`tiercel.mla_decode`, and all heads of a query read the same rows of
    the cache, selected by :func:`tiercel.top_k_indices`. The list is the only mask.

    An entry is a slot of the cache, ``page * page size + place``, as
    :func:`tiercel.mla_cache_write` takes it. -1, or any other slot outside of the cache, is
    skipped; an entry that occurs twice counts twice. A query without entries gets 0, and minus
    infinity as ``lse``.

    Scores, softmax and sums are float32; probabilities are rounded to 16 bits before they multiply
    values, and the result is rounded once.

    No gradient flows. Works under torch.compile and in CUDA graphs; it never synchronises. No
    contents of ``indices`` make a kernel read outside of the tensors.

    Args:
        q: ``[T, H, D]`` bfloat16: ``d_v`` columns that belong to the latent, then the
            rotary ones. The precompiled kernels take D = 576, and any strides that are
            multiples of 16 bytes with the last dimension contiguous.
        kv_cache: ``[pages, page size, D]`` of the dtype of ``q``, or float8_e4m3fn; or
            ``[pages, page size, 656]`` uint8: 512 float8, 4 float32 scales of
            128 of them each, 64 bfloat16. Rows that are not paged are ``rows[:, None]``, pages of
            one. The precompiled kernels take page sizes that are powers of two, and rows that start
            at multiples of 16 bytes.
        indices: ``[T, k]`` int32, any strides, in any order.
        scale: Factor of the scores, positive: ``192 ** -0.5`` for DeepSeek-V3.2 without YaRN.
        d_v: The number of columns of a value; the precompiled kernels take 512.
        kv_scale: ``[1]`` float32: factor of a float8 row; None is 1.
        return_lse: Whether to return each row's log-sum-exp (natural logarithm) too.
        out: ``[T, H, d_v]`` to write to, of the dtype and on the device of ``q``.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[T, H, d_v]``, the dtype of ``q``; with ``return_lse`` a pair of it and of ``[T, H]``,
        float32.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, device or option does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> indices = tiercel.top_k_indices(logits, 2048)
        >>> out = tiercel.mla_sparse_attention(q, kv_cache, indices, scale=192**-0.5)
    """
    given = (q, kv_cache, indices, scale, kv_scale, d_v, backend)
    op = _SPARSE_LSE if return_lse else _SPARSE
    if out is None:
        return op.pick()(*given)  # type: ignore[no-any-return]
    if not return_lse:
        return op.into()(out, *given)  # type: ignore[no-any-return]
    if not isinstance(q, Tensor) or q.dim() != 3:
        op.operator.check(*given)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return op.into()((out, lse), *given)  # type: ignore[no-any-return]
