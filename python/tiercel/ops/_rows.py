# SPDX-License-Identifier: Apache-2.0
"""Tensors as the kernels take them: rows at one distance, with neighbouring elements."""

from __future__ import annotations

from torch import Tensor


def rows(x: Tensor) -> Tensor:
    """x, or a copy where its rows are not at one distance, or its elements not neighbours."""
    if x.is_contiguous():
        return x
    steps = x.stride()
    regular = steps[-1] == 1 and all(
        steps[i] == steps[i + 1] * x.shape[i + 1] for i in range(x.dim() - 2)
    )
    return x if regular else x.contiguous()
