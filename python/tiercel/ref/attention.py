# SPDX-License-Identifier: Apache-2.0
"""Attention in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

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
) -> Tensor | tuple[Tensor, Tensor]:
    """As :func:`tiercel.attention`, for any sizes, with all scores in memory."""
    sum_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries, keys, values = (x.transpose(1, 2).to(sum_dtype) for x in (q, k, v))
    share = queries.shape[1] // max(keys.shape[1], 1)
    keys, values = (x.repeat_interleave(share, 1) for x in (keys, values))
    scores = queries @ keys.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)

    # The last query is aligned with the last key.
    left, right = (-1 if limit is None else limit for limit in window or (-1, -1))
    right = 0 if causal else right
    own = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1], device=q.device)
    hidden = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    if left >= 0:
        hidden = hidden | (key < own - left)
    if right >= 0:
        hidden = hidden | (key > own + right)
    scores = scores.masked_fill(hidden, -torch.inf)

    # A row that sees no key is 0, and its gradient too.
    blind = hidden.all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    out = (weights @ values).transpose(1, 2).to(q.dtype).contiguous()
    return (out, scores.logsumexp(-1)) if return_lse else out


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
) -> Tensor | tuple[Tensor, Tensor]:
    """As :func:`tiercel.attention_varlen`: one sequence after the other; it waits for the GPU."""
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    out = [q.new_zeros(0, *q.shape[1:])]
    sums = [q.new_zeros(q.shape[1], 0, dtype=torch.float32)]
    for i in range(len(starts_q) - 1):
        queries = slice(starts_q[i], starts_q[i + 1])
        keys = slice(starts_k[i], starts_k[i + 1])
        result, lse = attention(
            q[None, queries],
            k[None, keys],
            v[None, keys],
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            return_lse=True,
        )
        out.append(result[0])
        sums.append(lse[0])
    return (torch.cat(out), torch.cat(sums, 1)) if return_lse else torch.cat(out)
