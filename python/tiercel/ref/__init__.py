# SPDX-License-Identifier: Apache-2.0
"""The obvious PyTorch version of every operator: right, differentiable, on any device."""

from tiercel import _needs_torch as _needs_torch
from tiercel.ref.activation import (
    gelu,
    gelu_and_mul,
    relu,
    relu_and_mul,
    silu,
    silu_and_mul,
)
from tiercel.ref.linear import linear_act
from tiercel.ref.routing import topk_softmax
from tiercel.ref.transpose import copy_transpose

__all__ = [
    "copy_transpose",
    "gelu",
    "gelu_and_mul",
    "linear_act",
    "relu",
    "relu_and_mul",
    "silu",
    "silu_and_mul",
    "topk_softmax",
]
