# SPDX-License-Identifier: Apache-2.0
"""Routing with other scores, a bias, groups, shared experts or a table, in plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tiercel.ops.routing.reference import largest_of, moe_align_block_size


def exp_of_negative(x: Tensor) -> Tensor:
    """exp(x) for x <= 0: in float32 the kernels' sequence of operations, bit for bit."""
    if x.dtype == torch.float64:
        return x.exp()
    n = (x * 1.44269504).round()
    r = x - n * 0.693359375
    r = r - n * -2.12194440e-4
    p = torch.full_like(x, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + c
    p = p * r * r + r + 1.0
    power = (n.clamp(-126, 0).nan_to_num().int() + 127 << 23).view(torch.float32)
    return torch.where(x < -69.0, 0.0, p * power)


def _log_of_one_and(e: Tensor) -> Tensor:
    """log(1 + e) for e from 0 to 1, likewise."""
    if e.dtype == torch.float64:
        return e.log1p()
    z = e / (e + 2.0)
    s = z * z
    p = torch.full_like(e, 1 / 15)
    for odd in (13, 11, 9, 7, 5, 3):
        p = p * s + 1 / odd
    twice = z + z
    return twice * s * p + twice


def activated(x: Tensor, scoring: str) -> Tensor:
    """sigmoid(x), or sqrt(softplus(x)), without a gradient."""
    e = exp_of_negative(-x.abs())
    if scoring == "sigmoid":
        return torch.where(x < 0, e, 1.0) / (e + 1.0)
    return (torch.where(x < 0, 0.0, x) + _log_of_one_and(e)).sqrt()


def _softmax(x: Tensor) -> Tensor:
    """Without a gradient; the terms are added as whole numbers, so in any order."""
    largest = x.amax(-1, keepdim=True)
    if x.dtype == torch.float64:
        return torch.softmax(x, -1)
    terms = exp_of_negative(x - largest)
    whole = (terms.double() * 2.0**40).round().nan_to_num().long().sum(-1, keepdim=True)
    total = whole.float() * 2.0**-40
    return terms / torch.where(largest.abs() < math.inf, total, math.nan)


def _chosen(
    x: Tensor, k: int, scoring: str, bias: Tensor | None, n_group: int, topk_group: int
) -> Tensor:
    by = x
    if bias is not None:
        by = (_softmax(x) if scoring == "softmax" else activated(x, scoring)) + bias
    rows, experts = by.shape
    if topk_group == n_group:
        return largest_of(by, k)
    # With float32 scores the sum of two is rounded once, as in the kernels.
    grouped = by.view(rows, n_group, -1)
    best = grouped.gather(-1, largest_of(grouped, 1 if bias is None else 2))
    kept = largest_of(best.sum(-1), topk_group)
    size = experts // n_group
    # In the order of indices, so that ties are decided by them.
    places = kept.sort(-1).values[:, :, None] * size + torch.arange(size, device=x.device)
    places = places.flatten(1)
    return places.gather(-1, largest_of(by.gather(-1, places), k))


def _looked_up(tokens: Tensor, table: Tensor) -> Tensor:
    """The table's rows of tokens, -1 where it has none."""
    none = table.new_full((1, table.shape[1]), -1)
    known = (tokens >= 0) & (tokens < len(table))
    return torch.cat([table, none])[torch.where(known, tokens, len(table))]


def topk_route(
    scores: Tensor,
    columns: int,
    *,
    softmax_first: bool = True,
    renormalize: bool = False,
    indices_dtype: torch.dtype = torch.int32,
    correction_bias: Tensor | None = None,
    scoring: str = "softmax",
    n_group: int = 1,
    topk_group: int = 1,
    scaling_factor: float = 1.0,
    n_shared: int = 0,
    token_ids: Tensor | None = None,
    expert_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`tiercel.topk_softmax` in all its forms; float64 scores give float64 weights."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    bias = None if correction_bias is None else correction_bias.to(wide.dtype)
    k = columns - n_shared
    real = None  # which of the table's numbers are experts
    if expert_table is None or token_ids is None:
        order = _chosen(wide.detach(), k, scoring, bias, n_group, topk_group)
    else:
        found = _looked_up(token_ids.long(), expert_table.long())
        real = (found >= 0) & (found < scores.shape[1])
        order = torch.where(real, found, 0)
    if scoring == "softmax":
        if softmax_first and not renormalize:
            weights = torch.softmax(wide, dim=-1).gather(-1, order)
        else:
            chosen = wide.gather(-1, order)
            if real is not None:  # without an expert, numbers whose softmax is one
                none = torch.where(real.any(-1, keepdim=True), -math.inf, 0.0).to(wide.dtype)
                chosen = torch.where(real, chosen, none)
            weights = torch.softmax(chosen, dim=-1)
    else:
        chosen = wide.gather(-1, order)
        if scoring == "sigmoid":
            weights = torch.sigmoid(chosen)
        else:
            weights = torch.logaddexp(chosen, torch.zeros_like(chosen)).sqrt()
        if real is not None:
            weights = torch.where(real, weights, 0.0)
        if renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    if real is not None:
        weights, order = torch.where(real, weights, 0.0), torch.where(real, order, -1)
    weights = pad(weights * scaling_factor, (0, n_shared), value=1.0)
    shared = torch.arange(n_shared, device=order.device) + scores.shape[1]
    indices = torch.cat([order, shared.expand(len(order), -1)], dim=-1)
    return weights, indices.to(indices_dtype)


def whole_topk_softmax(scores: Tensor, k: int, **options: Any) -> tuple[Tensor, Tensor]:
    """:func:`topk_route` of k selected columns, as :func:`tiercel.topk_softmax` counts them."""
    return topk_route(scores, k + options.get("n_shared", 0), **options)


def whole_topk_softmax_align(
    scores: Tensor,
    k: int,
    block_size: int,
    expert_map: Tensor | None = None,
    *,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    """:func:`tiercel.topk_softmax_align` in all its forms."""
    weights, indices = whole_topk_softmax(scores, k, **options)
    aligned = moe_align_block_size(
        indices,
        block_size,
        scores.shape[1] + options.get("n_shared", 0),
        expert_map,
        pad_sorted_ids=pad_sorted_ids,
        ignore_invalid_experts=ignore_invalid_experts,
    )
    return weights, indices, *aligned
