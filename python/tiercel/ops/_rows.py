# SPDX-License-Identifier: Apache-2.0
"""Tensors as the kernels take them: rows at one distance, with neighbouring elements."""

from __future__ import annotations

import itertools

from torch import Tensor


def rows(x: Tensor) -> Tensor:
    """x, or a copy where its rows are not at one distance, or its elements not neighbours."""
    if x.is_contiguous():
        return x
    *outer, (columns, step) = zip(x.shape, x.stride(), strict=True)
    # The stride along a dimension of size 1 means nothing.
    outer = [(size, stride) for size, stride in outer if size != 1]
    regular = (step == 1 or columns == 1) and all(
        stride == size * inner for (_, stride), (size, inner) in itertools.pairwise(outer)
    )
    return x if regular else x.contiguous()
