# SPDX-License-Identifier: Apache-2.0
"""The operators; importing this registers ``torch.ops.tiercel.*``."""

from tiercel import _needs_torch as _needs_torch
from tiercel import backends
from tiercel._op import registry
from tiercel.ops.linear import linear_act
from tiercel.ops.norm import layer_norm, rms_norm
from tiercel.ops.routing import topk_softmax

backends.warn_of_unknown_names(registry)

__all__ = [
    "layer_norm",
    "linear_act",
    "rms_norm",
    "topk_softmax",
]
