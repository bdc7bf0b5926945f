# SPDX-License-Identifier: Apache-2.0
"""A number added to every element, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def toy_shift(x: Tensor, amount: float = 1.0) -> Tensor:
    """Reference of :func:`tiercel.toy_shift`."""
    return x + amount
