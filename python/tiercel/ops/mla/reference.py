# SPDX-License-Identifier: Apache-2.0
"""Latent attention and its cache in plain PyTorch, float32 arithmetic; float64 stays float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.ops.mla.spec import GROUP, LATENT
from tiercel.ops.rotary.reference import turned

_SCALES = LATENT + LATENT // GROUP * 4  # where those of a packed row end
_LEAST = 2.0**-126


def rows_of(kv_cache: Tensor, kv_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The rows of a cache, ``[pages, page size, D]``."""
    if kv_cache.dtype == torch.uint8:
        stored = kv_cache.contiguous()
        latents = stored[..., :LATENT].view(torch.float8_e4m3fn).to(dtype)
        scales = stored[..., LATENT:_SCALES].contiguous().view(torch.float32).to(dtype)
        rotary = stored[..., _SCALES:].contiguous().view(torch.bfloat16).to(dtype)
        return torch.cat([latents * scales.repeat_interleave(GROUP, -1), rotary], -1)
    rows = kv_cache.to(dtype)
    return rows if kv_scale is None else rows * kv_scale.to(dtype)


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seqused_k: Tensor,
    *,
    scale: float,
    kv_scale: Tensor | None = None,
    d_v: int = LATENT,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.mla_decode`, any sizes, with all scores in memory."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, queries, _, columns = q.shape
    pages, places, _ = kv_cache.shape
    table = page_table.long() if pages else page_table[:, :0].long()
    key = torch.arange(table.shape[1] * places, device=q.device)
    length = seqused_k.long().clamp(0, len(key))[:, None]
    # Contents are not trusted: an entry that is no page counts as the last one.
    table = table.where((table >= 0) & (table < pages), pages - 1)
    keys = rows_of(kv_cache, kv_scale, dtype)[table].reshape(batch, len(key), columns)
    keys = keys.masked_fill((key >= length)[..., None], 0.0)

    scores = torch.einsum("bqhd,bkd->bhqk", q.to(dtype), keys) * scale
    # The last query stands at the last key.
    own = length - queries + torch.arange(queries, device=q.device)
    seen = (key <= own[..., None])[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    blind = ~seen.any(-1, keepdim=True)  # a row that sees no key is 0
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    out = torch.einsum("bhqk,bkd->bqhd", weights, keys[..., :d_v]).to(q.dtype).contiguous()
    return (out, scores.logsumexp(-1)) if return_lse else out


def mla_sparse_attention(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    *,
    scale: float,
    kv_scale: Tensor | None = None,
    d_v: int = LATENT,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.mla_sparse_attention`, any sizes, with all keys gathered."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = rows_of(kv_cache, kv_scale, dtype).flatten(0, 1)
    real = (indices >= 0) & (indices < len(rows))
    if len(rows) == 0:
        rows = rows.new_zeros(1, rows.shape[1])
    keys = rows[indices.long().where(real, 0)].masked_fill(~real[..., None], 0.0)
    seen = real[:, None]
    scores = torch.einsum("thd,tkd->thk", q.to(dtype), keys) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    blind = ~seen.any(-1, keepdim=True)  # a query without keys is 0
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    out = torch.einsum("thk,tkd->thd", weights, keys[..., :d_v]).to(q.dtype).contiguous()
    return (out, scores.logsumexp(-1)) if return_lse else out


def indexer_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """Reference of :func:`tiercel.indexer_logits`, a head at a time."""
    dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
    keys = k.to(dtype).T
    logits = weights.new_zeros(len(q), len(k), dtype=dtype)
    for head in range(q.shape[1]):
        logits += (q[:, head].to(dtype) @ keys).relu() * weights[:, head, None].to(dtype)
    logits *= k_scale.to(dtype)
    key = torch.arange(len(k), device=q.device)
    if starts is not None:
        logits = logits.masked_fill(key < starts[:, None], -torch.inf)
    if ends is not None:
        logits = logits.masked_fill(key >= ends[:, None], -torch.inf)
    return logits


def top_k_indices(logits: Tensor, k: int = 2048, lengths: Tensor | None = None) -> Tensor:
    """Reference of :func:`tiercel.top_k_indices`."""
    columns = logits.shape[1]
    if lengths is not None:
        column = torch.arange(columns, device=logits.device)
        logits = logits.masked_fill(column >= lengths.long()[:, None], -torch.inf)
    largest, order = logits.sort(dim=1, descending=True, stable=True)
    # Candidates that are none go behind all others.
    order = order.masked_fill(largest == -torch.inf, columns)[:, :k].sort(dim=1).values
    indices = order.new_full((len(logits), k), -1)
    indices[:, : order.shape[1]] = order.masked_fill(order == columns, -1)
    return indices.int()


def mla_cache_write(
    latent: Tensor,
    rotary: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    *,
    kv_scale: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Reference of :func:`tiercel.mla_cache_write`; float64 stays float64."""
    blocks, places, _ = kv_cache.shape
    real = (slots >= 0) & (slots < blocks * places)
    slot = slots[real].long()
    rotary = rotary[real]
    if positions is not None and cos_sin_cache is not None:
        wide = rotary if rotary.dtype == torch.float64 else rotary.float()
        rotary = turned(wide[:, None], positions[real], cos_sin_cache, interleaved)[:, 0]
    rows = _row(latent[real], rotary, kv_cache.dtype, kv_scale)
    place = slot // max(places, 1), slot % max(places, 1)
    # Not every device indexes float8: its bits are as good.
    if rows.element_size() == 1:
        kv_cache.view(torch.uint8)[place] = rows.view(torch.uint8)
    else:
        kv_cache[place] = rows
    return kv_cache


def _row(latent: Tensor, rotary: Tensor, dtype: torch.dtype, kv_scale: Tensor | None) -> Tensor:
    """Rows of a cache of that dtype."""
    if dtype == torch.uint8:
        groups = latent.float().unflatten(1, (-1, GROUP))
        largest = groups.abs().amax(-1, keepdim=True)
        # On a GPU, PyTorch multiplies by the reciprocal of a number, but divides by a tensor.
        scales = (largest / torch.full_like(largest, 448.0)).clamp_min(_LEAST)
        parts = (_narrowed((groups / scales).flatten(1)), scales[..., 0], rotary.bfloat16())
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
    row = torch.cat([latent.to(rotary.dtype), rotary], 1)
    if dtype != torch.float8_e4m3fn:
        return row.to(dtype)
    wide = row if row.dtype == torch.float64 else row.float()
    return _narrowed(wide if kv_scale is None else wide / kv_scale)


def _narrowed(x: Tensor) -> Tensor:
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)  # NaN stays
