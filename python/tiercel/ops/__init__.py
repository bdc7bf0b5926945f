# SPDX-License-Identifier: Apache-2.0
"""The operators; importing this registers ``torch.ops.tiercel.*``."""

from tiercel import _needs_torch as _needs_torch
from tiercel import backends
from tiercel._op import registry
from tiercel.ops.linear import linear_act
from tiercel.ops.reduce import reduce, reduce_sum
from tiercel.ops.routing import topk_softmax
from tiercel.ops.transpose import copy_transpose

backends.warn_of_unknown_names(registry)

__all__ = [
    "copy_transpose",
    "linear_act",
    "reduce",
    "reduce_sum",
    "topk_softmax",
]
