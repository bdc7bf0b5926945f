# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts routing in plain PyTorch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_Form = Callable[..., tuple[Tensor, ...]]


def _with_routes(plain: _Form) -> _Form:
    """Adds the options of `whole_...` in plain_route.py, which the plain form lacks."""
    known = inspect.signature(plain).parameters.keys()

    @functools.wraps(plain)
    def run(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        from tiercel.ops.routing import plain_route

        whole: _Form = getattr(plain_route, f"whole_{plain.__name__}")
        return (plain if options.keys() <= known else whole)(*args, **options)

    return run


@_with_routes
def topk_softmax(
    scores: Tensor,
    k: int,
    *,
    softmax_first: bool = True,
    renormalize: bool = False,
    indices_dtype: torch.dtype = torch.int32,
) -> tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.topk_softmax`, any sizes; float64 scores give float64 weights."""
    order = largest_of(scores.detach(), k)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    if softmax_first:
        weights = torch.softmax(wide, dim=-1).gather(-1, order)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
    else:
        weights = torch.softmax(wide.gather(-1, order), dim=-1)
    return weights, order.to(indices_dtype)


def largest_of(values: Tensor, k: int) -> Tensor:
    """The places of the k largest of each row, descending: NaN first, ties by lowest index."""
    # A radix sort sees bits: give every NaN, and both zeros, one pattern each.
    keys = torch.where(values == 0, torch.zeros_like(values), values)
    keys = torch.where(values.isnan(), torch.full_like(values, torch.nan), keys)
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    *,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of :func:`tiercel.moe_align_block_size`, for any sizes."""
    experts = topk_ids.flatten().long()
    numel, device = experts.numel(), experts.device
    slots = numel + num_experts * (block_size - 1)
    if pad_sorted_ids:
        slots = -(-slots // block_size) * block_size
    if numel < num_experts:
        slots = min(numel * block_size, slots)

    experts = torch.where((experts >= 0) & (experts < num_experts), experts, num_experts)
    if expert_map is not None and ignore_invalid_experts:
        none = torch.full((1,), num_experts, device=device)
        mapped = torch.cat([expert_map.long(), none])[experts]
        experts = torch.where((mapped >= 0) & (mapped < num_experts), mapped, num_experts)
    order = torch.argsort(experts, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, experts, torch.ones_like(experts))
    blocks = (counts[:num_experts] + block_size - 1) // block_size
    ends = torch.cumsum(blocks, 0)  # the first block behind each expert's
    # Elements that are left out go to one more slot behind all others, which is cut off.
    begins = torch.cat([(ends - blocks) * block_size, torch.full((1,), slots, device=device)])
    by_expert = experts[order]
    rank = torch.arange(numel, device=device) - (torch.cumsum(counts, 0) - counts)[by_expert]
    place = torch.where(by_expert < num_experts, begins[by_expert] + rank, slots)
    sorted_ids = torch.full((slots + 1,), numel, dtype=torch.int32, device=device)
    sorted_ids[place] = torch.where(by_expert < num_experts, order, numel).int()

    block = torch.arange(-(-slots // block_size), device=device)
    expert_ids = torch.searchsorted(ends, block, right=True)
    used = expert_ids < num_experts
    if expert_map is not None and not ignore_invalid_experts:
        expert_ids = expert_map.long()[expert_ids.clamp(max=num_experts - 1)]
    expert_ids = torch.where(used, expert_ids, -1).int()
    return sorted_ids[:slots].clone(), expert_ids, (ends[-1:] * block_size).int()


@_with_routes
def topk_softmax_align(
    scores: Tensor,
    k: int,
    block_size: int,
    expert_map: Tensor | None = None,
    *,
    softmax_first: bool = True,
    renormalize: bool = False,
    indices_dtype: torch.dtype = torch.int32,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Reference of :func:`tiercel.topk_softmax_align`, for any sizes."""
    weights, indices = topk_softmax(
        scores,
        k,
        softmax_first=softmax_first,
        renormalize=renormalize,
        indices_dtype=indices_dtype,
    )
    aligned = moe_align_block_size(
        indices,
        block_size,
        scores.shape[1],
        expert_map,
        pad_sorted_ids=pad_sorted_ids,
        ignore_invalid_experts=ignore_invalid_experts,
    )
    return weights, indices, *aligned


def moe_sum(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Reference of :func:`tiercel.moe_sum`, for any sizes; float64 is summed in float64."""
    wide = x if x.dtype == torch.float64 else x.float()
    if weights is not None:
        wide = wide * weights.to(wide.dtype)[:, :, None]
    return wide.sum(dim=1).to(x.dtype)
