# SPDX-License-Identifier: Apache-2.0
"""softmax and its logarithm in plain PyTorch: float32 arithmetic, one rounding at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_online(
    x: Tensor, dim: int = -1, *, scale: float | None = None, mask: Tensor | None = None
) -> Tensor:
    """Reference of :func:`tiercel.softmax_online`, on any device; float64 stays float64."""
    return torch.softmax(_scores(x, scale, mask), dim).to(x.dtype)


def log_softmax(
    x: Tensor, dim: int = -1, *, scale: float | None = None, mask: Tensor | None = None
) -> Tensor:
    """Reference of :func:`tiercel.log_softmax`, on any device; float64 stays float64."""
    return torch.log_softmax(_scores(x, scale, mask), dim).to(x.dtype)


def _scores(x: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
    scores = x if x.dtype == torch.float64 else x.float()
    if scale is not None:
        scores = scores * scale
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    return scores + mask
