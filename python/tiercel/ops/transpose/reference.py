# SPDX-License-Identifier: Apache-2.0
"""Transposed copies in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_transpose(x: Tensor, *, tile_size: int | None = None) -> Tensor:
    """Reference of :func:`tiercel.copy_transpose`, for any dtype; `tile_size` is ignored."""
    return x.transpose(-2, -1).clone(memory_format=torch.contiguous_format)
