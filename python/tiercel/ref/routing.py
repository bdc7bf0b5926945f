# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts routing in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def topk_softmax(
    scores: Tensor,
    k: int,
    *,
    softmax_first: bool = True,
    renormalize: bool = False,
    indices_dtype: torch.dtype = torch.int32,
) -> tuple[Tensor, Tensor]:
    """As :func:`tiercel.topk_softmax`, for any sizes; float64 scores give float64 weights."""
    order = _largest(scores.detach(), k)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    if softmax_first:
        weights = torch.softmax(wide, dim=-1).gather(-1, order)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
    else:
        weights = torch.softmax(wide.gather(-1, order), dim=-1)
    return weights, order.to(indices_dtype)


def _largest(scores: Tensor, k: int) -> Tensor:
    """The k largest of each row, descending: NaN first, ties by lowest index."""
    # A radix sort sees bits: give every NaN, and both zeros, one pattern each.
    keys = torch.where(scores == 0, torch.zeros_like(scores), scores)
    keys = torch.where(scores.isnan(), torch.full_like(scores, torch.nan), keys)
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()
