# SPDX-License-Identifier: Apache-2.0
"""Type aliases for backends: a tensor and, as its annotation, what the contract says of it."""

from __future__ import annotations

from typing import Annotated, Protocol

import torch
from torch import Tensor

from tiercel.plugins.contracts.routing import TOPK_SOFTMAX

__all__ = ["Indices", "Scores", "TopkSoftmax", "Weights"]

# Routing: scores [T, E] float32, bfloat16 or float16, any strides; weights [T, k] float32;
# indices [T, k] of the dtype `indices_dtype`.
Scores = Annotated[Tensor, TOPK_SOFTMAX.spec("scores")]
Weights = Annotated[Tensor, TOPK_SOFTMAX.spec("weights")]
Indices = Annotated[Tensor, TOPK_SOFTMAX.spec("indices")]


class TopkSoftmax(Protocol):
    """A backend of topk_softmax."""

    def __call__(
        self,
        scores: Scores,
        k: int,
        softmax_first: bool,
        renormalize: bool,
        indices_dtype: torch.dtype,
    ) -> tuple[Weights, Indices]: ...
