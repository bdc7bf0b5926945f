# SPDX-License-Identifier: Apache-2.0
"""Type aliases for backends: a tensor and, as its annotation, what the contract says of it."""

from __future__ import annotations

from typing import Annotated, Protocol

import torch
from torch import Tensor

from tiercel.plugins.contracts.linear import LINEAR_ACT
from tiercel.plugins.contracts.norm import RMS_NORM
from tiercel.plugins.contracts.routing import TOPK_SOFTMAX

__all__ = [
    "Activated",
    "Bias",
    "Features",
    "Indices",
    "LinearAct",
    "Norm",
    "NormBias",
    "NormWeight",
    "Normalised",
    "Residual",
    "ResidualSum",
    "Rows",
    "Scores",
    "TopkSoftmax",
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


# Norms: x [M, N] float32, bfloat16 or float16, any strides, residual the same; weight and bias [N]
# of its dtype or float32.
Rows = Annotated[Tensor, RMS_NORM.spec("x")]
NormWeight = Annotated["Tensor | None", RMS_NORM.spec("weight")]
NormBias = Annotated["Tensor | None", RMS_NORM.spec("bias")]
Residual = Annotated["Tensor | None", RMS_NORM.spec("residual")]
Normalised = Annotated[Tensor, RMS_NORM.spec("out")]
ResidualSum = Annotated[Tensor, RMS_NORM.spec("residual_out")]


class Norm(Protocol):
    """A backend of rms_norm or layer_norm; it returns the pair where there is a residual."""

    def __call__(
        self, x: Rows, weight: NormWeight, bias: NormBias, residual: Residual, eps: float
    ) -> Normalised | tuple[Normalised, ResidualSum]: ...
