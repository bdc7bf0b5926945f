# SPDX-License-Identifier: Apache-2.0
"""Type aliases for backends: a tensor and, as its annotation, what the contract says of it."""

from __future__ import annotations

from typing import Annotated, Protocol

import torch
from torch import Tensor

from tiercel.plugins.contracts.linear import LINEAR_ACT
from tiercel.plugins.contracts.reduce import REDUCE
from tiercel.plugins.contracts.routing import TOPK_SOFTMAX
from tiercel.plugins.contracts.transpose import COPY_TRANSPOSE

__all__ = [
    "Activated",
    "Bias",
    "CopyTranspose",
    "Features",
    "Indices",
    "LinearAct",
    "Matrices",
    "Reduce",
    "Reduced",
    "Scores",
    "TopkSoftmax",
    "Transposed",
    "Unreduced",
    "Weight",
    "Weights",
]

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


# Linear: x [M, K] bfloat16 or float16, weight [N, K], bias [N] or None, any strides; out [M, N].
Features = Annotated[Tensor, LINEAR_ACT.spec("x")]
Weight = Annotated[Tensor, LINEAR_ACT.spec("weight")]
Bias = Annotated["Tensor | None", LINEAR_ACT.spec("bias")]
Activated = Annotated[Tensor, LINEAR_ACT.spec("out")]


class LinearAct(Protocol):
    """A backend of linear_act; leading dimensions of ``x`` are made one before it."""

    def __call__(self, x: Features, weight: Weight, bias: Bias, activation: str) -> Activated: ...


# Transpose: x [B, M, N] of 1-, 2- or 4-byte elements, any strides; out [B, N, M].
Matrices = Annotated[Tensor, COPY_TRANSPOSE.spec("x")]
Transposed = Annotated[Tensor, COPY_TRANSPOSE.spec("out")]


class CopyTranspose(Protocol):
    """A backend of copy_transpose; a single matrix comes as a batch of one."""

    def __call__(self, x: Matrices) -> Transposed: ...


# Reduce: x [A, N, B] float32, bfloat16 or float16, any strides, over dimension 1; out [A, B] of the
# dtype `dtype`, that of x or float32.
Unreduced = Annotated[Tensor, REDUCE.spec("x")]
Reduced = Annotated[Tensor, REDUCE.spec("out")]


class Reduce(Protocol):
    """A backend of reduce; other shapes are made this one before it, so `dim` is always 1."""

    def __call__(self, x: Unreduced, dim: int, op: str, dtype: torch.dtype) -> Reduced: ...
