# SPDX-License-Identifier: Apache-2.0
"""new_kernel: topk_softmax in plain PyTorch.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

import torch

import tiercel
from tiercel.plugins.types import Indices, Scores, Weights


@tiercel.backends.register(
    op="topk_softmax",
    name="new_kernel",
    language="torch",
    description="torch.sort of all scores",
)
def new_kernel(
    scores: Scores,  # [T, E] float32, bfloat16 or float16, any strides
    k: int,
    softmax_first: bool,
    renormalize: bool,
    indices_dtype: torch.dtype,  # torch.int32 or torch.int64
) -> tuple[Weights, Indices]:  # both [T, k]
    # Sorting puts NaN first, as it has to be. It is stable, so among equal scores the lowest index
    # comes first; adding 0.0 makes -0.0 equal to 0.0 for it.
    wide = scores.float() + 0.0
    values, indices = torch.sort(wide, dim=-1, descending=True, stable=True)
    values, indices = values[:, :k], indices[:, :k].contiguous()
    if softmax_first and not renormalize:
        # The denominator is over the whole row.
        weights = torch.softmax(wide, dim=-1).gather(-1, indices)
    else:
        weights = torch.softmax(values, dim=-1)
    return weights, indices.to(indices_dtype)
