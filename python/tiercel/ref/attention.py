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
    queries, keys, values = _by_query_head(q, k, v)
    scores, hidden, _ = _scores(queries, keys, causal, window, scale, softcap)
    # A row that sees no key is 0, and its gradient too.
    blind = hidden.all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    out = (weights @ values).transpose(1, 2).to(q.dtype).contiguous()
    return (out, scores.logsumexp(-1)) if return_lse else out


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from what attention gave and the gradients of that."""
    queries, keys, values = _by_query_head(q, k, v)
    scores, _, slope = _scores(queries, keys, causal, window, scale, softcap)
    grads, results = (x.transpose(1, 2).to(queries.dtype) for x in (grad, out))
    sums = lse.to(queries.dtype)
    weights = torch.exp(scores - sums.masked_fill(sums == -torch.inf, 0.0)[..., None])
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
    """As [B, H, S, D], keys and values once for each head of queries, in float32 or float64."""
    sum_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries, keys, values = (x.transpose(1, 2).to(sum_dtype) for x in (q, k, v))
    share = queries.shape[1] // max(keys.shape[1], 1)
    return queries, keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)


def _scores(
    queries: Tensor,
    keys: Tensor,
    causal: bool,
    window: Sequence[int | None] | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Masked scores, which of them are hidden, and their derivatives by the products."""
    slope: Tensor | float = queries.shape[-1] ** -0.5 if scale is None else scale
    scores = queries @ keys.transpose(-1, -2) * slope
    if softcap is not None:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, slope * (1 - bent * bent)

    # The last query is aligned with the last key.
    left, right = (-1 if limit is None else limit for limit in window or (-1, -1))
    right = 0 if causal else right
    rows, columns = scores.shape[-2:]
    own = torch.arange(rows, device=queries.device)[:, None] + columns - rows
    key = torch.arange(columns, device=queries.device)
    hidden = torch.zeros(rows, columns, dtype=torch.bool, device=queries.device)
    if left >= 0:
        hidden = hidden | (key < own - left)
    if right >= 0:
        hidden = hidden | (key > own + right)
    return scores.masked_fill(hidden, -torch.inf), hidden, slope


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
