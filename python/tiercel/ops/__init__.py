# SPDX-License-Identifier: Apache-2.0
"""The operators; importing this registers ``torch.ops.tiercel.*``."""

from tiercel import _needs_torch as _needs_torch
from tiercel import backends
from tiercel._op import registry
from tiercel.ops.activation import (
    gelu,
    gelu_and_mul,
    relu,
    relu_and_mul,
    silu,
    silu_and_mul,
)
from tiercel.ops.linear import linear_act
from tiercel.ops.routing import topk_softmax
from tiercel.ops.transpose import copy_transpose

backends.warn_of_unknown_names(registry)

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
