# SPDX-License-Identifier: Apache-2.0
"""The obvious PyTorch version of every operator: right, differentiable, on any device."""

from tiercel import _needs_torch as _needs_torch
from tiercel.ref.linear import linear_act
from tiercel.ref.routing import moe_align_block_size, moe_sum, topk_softmax, topk_softmax_align

__all__ = [
    "linear_act",
    "moe_align_block_size",
    "moe_sum",
    "topk_softmax",
    "topk_softmax_align",
]
