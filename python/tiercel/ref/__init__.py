# SPDX-License-Identifier: Apache-2.0
"""The obvious PyTorch version of every operator: right, differentiable, on any device."""

from tiercel import _needs_torch as _needs_torch
from tiercel.ref.attention import attention
from tiercel.ref.linear import linear_act
from tiercel.ref.routing import topk_softmax

__all__ = [
    "attention",
    "linear_act",
    "topk_softmax",
]
