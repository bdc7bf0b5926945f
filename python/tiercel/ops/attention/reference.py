# SPDX-License-Identifier: Apache-2.0
"""Attention in plain PyTorch: of many queries, over paged keys, and two results merged."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.attention`, for any sizes, with all scores in memory."""
    descales = (q_descale, k_descale, v_descale)
    queries, keys, values = (
        x if scale is None else x * _by_query_head_scale(scale, q, k)
        for x, scale in zip(_by_query_head(q, k, v), descales, strict=True)
    )
    scores, hidden, _ = _scores(queries, keys, causal, window, scale, softcap)
    keys_seen = scores.shape[-1]
    if sinks is not None:  # a last key whose value is 0
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    # A row that sees no key is 0, and its gradient too.
    blind = hidden.all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1)[..., :keys_seen].masked_fill(blind, 0.0)
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    out = (weights @ values).transpose(1, 2).to(dtype).contiguous()
    return (out, scores.logsumexp(-1)) if return_lse else out


def sinks_backward(delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of [H] sinks; `delta` and `lse` are [B, H, S]."""
    share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return -(share * delta).masked_fill(lse == -torch.inf, 0.0).sum((0, 2)).to(sinks.dtype)


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    grad_lse: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from what attention gave and the gradients of that."""
    queries, keys, values = _by_query_head(q, k, v)
    scores, _, slope = _scores(queries, keys, **options)
    grads, results = (x.transpose(1, 2).to(queries.dtype) for x in (grad, out))
    sums = lse.to(queries.dtype)
    blind = (sums == -torch.inf)[..., None]  # rows that saw no key
    weights = torch.exp(scores - sums[..., None].masked_fill(blind, 0.0)).masked_fill(blind, 0.0)
    delta = (grads * results).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    of_scores = weights * (grads @ values.transpose(-1, -2) - delta[..., None]) * slope

    def of_keys(gradient: Tensor) -> Tensor:
        shared = gradient.unflatten(1, (k.shape[2], -1)).sum(2)
        return shared.transpose(1, 2).to(k.dtype).contiguous()

    return (
        (of_scores @ keys).transpose(1, 2).to(q.dtype).contiguous(),
        of_keys(of_scores.transpose(-1, -2) @ queries),
        of_keys(weights.transpose(-1, -2) @ grads),
    )


def _by_query_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """To [B, H, S, D], keys and values once for each head of queries, in float32 or float64."""
    sum_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries, keys, values = (x.transpose(1, 2).to(sum_dtype) for x in (q, k, v))
    share = queries.shape[1] // max(keys.shape[1], 1)
    return queries, keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)


def _by_query_head_scale(scale: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A scale of one element, [Hk] or [B, Hk] in the shape [B, H, 1, 1]."""
    shared = q.shape[2] // max(k.shape[2], 1)
    if scale.numel() == 1:
        return scale.reshape(())
    per_head = scale.expand(k.shape[0], k.shape[2]).repeat_interleave(shared, 1)
    return per_head[..., None, None]


def _scores(
    queries: Tensor,
    keys: Tensor,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Masked scores, which of them are hidden, and their derivatives by the products."""
    slope: Tensor | float = queries.shape[-1] ** -0.5 if scale is None else scale
    scores = queries @ keys.transpose(-1, -2) * slope
    if softcap is not None:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, slope * (1 - bent * bent)

    hidden = _hidden(scores, causal, window)
    return scores.masked_fill(hidden, -torch.inf), hidden, slope


def _hidden(scores: Tensor, causal: bool, window: Sequence[int | None] | None) -> Tensor:
    """The keys that rows do not see; the last query is aligned with the last key."""
    left, right = (-1 if limit is None else limit for limit in window or (-1, -1))
    right = 0 if causal else right
    rows, columns = scores.shape[-2:]
    own = torch.arange(rows, device=scores.device)[:, None] + columns - rows
    key = torch.arange(columns, device=scores.device)
    hidden = torch.zeros(rows, columns, dtype=torch.bool, device=scores.device)
    if left >= 0:
        hidden = hidden | (key < own - left)
    if right >= 0:
        hidden = hidden | (key > own + right)
    return hidden


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.attention_varlen`, sequence by sequence; waits for the GPU."""
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    sum_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out: list[Tensor] = []
    sums: list[Tensor] = []
    done = 0

    def skip_to(row: int) -> None:
        """Rows in no sequence."""
        out.append(q.new_zeros(row - done, q.shape[1], v.shape[2], dtype=dtype))
        sums.append(q.new_full((q.shape[1], row - done), -torch.inf, dtype=sum_dtype))

    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    if max_seqlen_k == 0:
        k, v = k[:0], v[:0]
    pairs = sequences(cu_seqlens_q, cu_seqlens_k, len(q), len(k))
    for i, (queries, keys) in enumerate(pairs):
        if queries.stop <= done:
            continue
        own = {name: _entry(scale, i) for name, scale in descales.items()}
        result, lse = attention(
            q[None, queries],
            k[None, keys],
            v[None, keys],
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            return_lse=True,
            **own,
        )
        skip_to(max(queries.start, done))
        new = max(done - queries.start, 0)  # starts that decrease: the first sequence's rows stay
        out.append(result[0, new:])
        sums.append(lse[0, :, new:])
        done = queries.stop
    skip_to(len(q))
    return (torch.cat(out), torch.cat(sums, 1)) if return_lse else torch.cat(out)


def _entry(scale: Tensor | None, i: int) -> Tensor | None:
    """The row of one entry if the scale is [B, Hk]; other scales are of all entries."""
    shared = scale is None or scale.ndim < 2 or scale.numel() == 1
    return scale if shared else scale[i : i + 1]


def attention_varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    grad_lse: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """attention_backward, one sequence after the other; it waits for the GPU."""
    found = tuple(torch.zeros_like(x) for x in (q, k, v))
    for queries, keys in sequences(cu_seqlens_q, cu_seqlens_k, len(q), len(k)):
        parts = attention_backward(
            grad[None, queries],
            q[None, queries],
            k[None, keys],
            v[None, keys],
            out[None, queries],
            lse[None, :, queries],
            grad_lse=None if grad_lse is None else grad_lse[None, :, queries],
            **options,
        )
        for whole, rows, part in zip(found, (queries, keys, keys), parts, strict=True):
            whole[rows] = part[0]
    return found


def sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, queries: int, keys: int
) -> Iterator[tuple[slice, slice]]:
    """The rows of each sequence's queries and keys, of that many; it waits for the GPU."""
    starts = (cu_seqlens_q.tolist(), queries), (cu_seqlens_k.tolist(), keys)
    yield from zip(*(_slices(*each) for each in starts), strict=True)


def _slices(starts: list[int], rows: int) -> Iterator[slice]:
    """Contents are not trusted: each is cut to the rows, and is empty where it would end early."""
    cut = [min(max(start, 0), rows) for start in starts]
    for first, last in itertools.pairwise(cut):
        yield slice(first, max(first, last))


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.decode_attention`, any page size, with all scores in memory."""
    sum_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, queries, heads, d = q.shape
    pages, places, kv_heads, _ = k_cache.shape
    table = page_table.long() if pages else page_table[:, :0].long()
    key = torch.arange(table.shape[1] * places, device=q.device)
    length = seqused_k.long().clamp(0, len(key))[:, None, None]
    used = key < length[:, 0]
    # Contents are not trusted: an entry that is no page counts as the last one.
    table = table.where((table >= 0) & (table < pages), pages - 1)

    def rows(cache: Tensor, factor: Tensor | None) -> Tensor:
        """[B, H, keys, D]"""
        stored = cache.to(sum_dtype)[table].reshape(batch, len(key), kv_heads, d)
        if factor is not None:
            stored = stored * factor.reshape(-1, 1)
        stored = stored.masked_fill(~used[..., None, None], 0.0)
        return stored.transpose(1, 2).repeat_interleave(heads // max(kv_heads, 1), 1)

    keys, values = rows(k_cache, k_scale), rows(v_cache, v_scale)
    scores = q.transpose(1, 2).to(sum_dtype) @ keys.transpose(-1, -2)
    scores = scores * (d**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)

    # The last query is aligned with the last key.
    left, right = (-1 if limit is None else limit for limit in window or (-1, -1))
    right = 0 if causal else right
    own = length - queries + torch.arange(queries, device=q.device)[:, None]
    seen = key < length
    if left >= 0:
        seen = seen & (key >= own - left)
    if right >= 0:
        seen = seen & (key <= own + right)
    if prefix is not None:
        seen = seen | (key < prefix.long()[:, None, None].minimum(length))
    seen = seen.broadcast_to(batch, queries, len(key))[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)

    # A row that sees no key is 0.
    blind = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    out = (weights @ values).transpose(1, 2).to(q.dtype).contiguous()
    return (out, scores.logsumexp(-1)) if return_lse else out


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    tree_mask: Tensor | None = None,
    prefix: Tensor | None = None,
    causal: bool = True,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    max_seqused_k: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.paged_attention`, sequence by sequence; waits for the GPU."""
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    sum_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    pages, places, kv_heads, _ = k_cache.shape
    out = q.new_zeros((*q.shape[:2], v_cache.shape[3]), dtype=dtype)
    lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=sum_dtype)
    capacity = page_table.shape[1] * places if pages else 0
    for b, rows in enumerate(_slices(cu_seqlens_q.tolist(), len(q))):
        length = min(max(int(seqused_k[b]), 0), capacity)
        table = page_table[b, : -(-length // max(places, 1))].long()
        # Contents are not trusted: an entry that is no page counts as the last one.
        table = table.where((table >= 0) & (table < pages), pages - 1)

        def stored(
            cache: Tensor, factor: Tensor | None, table: Tensor = table, length: int = length
        ) -> Tensor:
            """[1, length, Hk, D or Dv]"""
            found = cache[table].to(sum_dtype).reshape(-1, kv_heads, cache.shape[3])[:length]
            return (found if factor is None else found * factor.reshape(-1, 1))[None]

        own = q[rows].to(sum_dtype)
        queries, keys, values = _by_query_head(
            (own if q_scale is None else own * q_scale)[None],
            *(stored(*each) for each in ((k_cache, k_scale), (v_cache, v_scale))),
        )
        scores, _, _ = _scores(queries, keys, scale=scale, softcap=softcap)
        if tree_mask is None:
            hidden = _hidden(scores, causal, window)
        else:
            left = None if window is None else window[0]
            hidden = ~_seen_in_tree(tree_mask[rows], length, -1 if left is None else left)
        if prefix is not None:
            hidden = hidden & (torch.arange(length, device=q.device) >= prefix[b])
        scores = scores.masked_fill(hidden, -torch.inf)
        sums = scores.logsumexp(-1)
        if sinks is not None:
            sums = torch.logaddexp(sums, sinks.to(sum_dtype)[:, None])
        blind = (sums == -torch.inf)[..., None]  # rows that see no key
        weights = torch.exp(scores - sums[..., None].masked_fill(blind, 0.0))
        out[rows] = (weights @ values)[0].transpose(0, 1).to(dtype)
        lse[:, rows] = sums[0].to(sum_dtype)
    return (out, lse) if return_lse else out


def _seen_in_tree(words: Tensor, keys: int, left: int) -> Tensor:
    """Which keys, of which the last are the new tokens, each new token's row sees."""
    number = torch.arange(keys, device=words.device) - (keys - len(words))
    bits = (words[:, None] >> number.clamp(0, 63)) & 1 == 1
    seen = (number < 0) | (bits & (number < 64))
    if left >= 0:
        behind = seen.flip(-1).cumsum(-1).flip(-1) - seen.long()  # keys seen behind each one
        blind = ~(seen & (number >= 0)).any(-1, keepdim=True)  # not even itself
        seen = seen & (behind + blind.long() <= left)
    return seen


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.merge_attention_states`; float64 stays float64."""
    sum_dtype = torch.float64 if out_a.dtype == torch.float64 else torch.float32
    lse = torch.logaddexp(lse_a, lse_b)
    merged = torch.zeros(out_a.shape, dtype=sum_dtype, device=out_a.device)
    for out, own in ((out_a, lse_a), (out_b, lse_b)):
        share = (own - lse).exp().transpose(1, 2)[..., None].to(sum_dtype)
        none = (own == -torch.inf).transpose(1, 2)[..., None]  # whatever stands there
        merged = merged + (out.to(sum_dtype) * share).masked_fill(none, 0.0)
    return merged.to(out_a.dtype), lse
