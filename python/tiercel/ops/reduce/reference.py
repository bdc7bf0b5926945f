# SPDX-License-Identifier: Apache-2.0
"""Reductions in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def reduce(
    x: Tensor,
    dim: int | None = None,
    op: str = "sum",
    *,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Reference of :func:`tiercel.reduce`; float64 stays float64."""
    wide = x if x.dtype == torch.float64 else x.float()
    dims = list(range(x.dim())) if dim is None else [dim]
    if op in ("max", "amax"):
        result = wide.amax(dims, keepdim=keepdim)
    elif op == "mean":
        result = wide.mean(dims, keepdim=keepdim)
    else:
        result = wide.sum(dims, keepdim=keepdim)
    if x.dtype == torch.float64:
        return result
    return result.to(dtype or x.dtype)
