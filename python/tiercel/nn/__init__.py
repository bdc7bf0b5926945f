# SPDX-License-Identifier: Apache-2.0
"""Modules that plug into a model."""

from tiercel import _needs_torch as _needs_torch
from tiercel.nn.activation import GeluAndMul, ReluAndMul, SiluAndMul
from tiercel.nn.attention import Attention
from tiercel.nn.linear import LinearAct
from tiercel.nn.norm import LayerNorm, RMSNorm
from tiercel.nn.routing import TopkSoftmax
from tiercel.nn.softmax import SoftmaxOnline

__all__ = [
    "Attention",
    "GeluAndMul",
    "LayerNorm",
    "LinearAct",
    "RMSNorm",
    "ReluAndMul",
    "SiluAndMul",
    "SoftmaxOnline",
    "TopkSoftmax",
]
