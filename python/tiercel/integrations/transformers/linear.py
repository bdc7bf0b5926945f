# SPDX-License-Identifier: Apache-2.0
"""Linear layers of a Hugging Face model: decoding steps on `linear_act`, training as one function
of autograd."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import tiercel
from tiercel.core import invariance
from tiercel.integrations.transformers.forwards import is_replaced
from tiercel.integrations.transformers.projections import trained_linear

_FEW_ROWS = 64  # up to which reading the weight is all that a linear layer costs
_DTYPES = (torch.bfloat16, torch.float16)
_PLAIN = (
    Tensor,
    nn.Parameter,
)  # others, such as DTensor and quantised weights, have kernels of their own


def why_not_linear(module: nn.Module) -> str | None:
    """Why a module is no linear layer for `linear_forward`; empty if it does not look like one."""
    if type(module) is not nn.Linear:  # subclasses have weights of their own kind
        return ""
    if is_replaced(module):
        ours = getattr(module.forward, "__module__", "").startswith("tiercel.")
        return "" if ours else "its forward is replaced already"
    if type(module.weight) is not nn.Parameter:
        return "its weight is no plain parameter"
    return None


def linear_forward(self: nn.Module, x: Tensor) -> Tensor:
    """That of `nn.Linear`, with our kernel for few rows in 16 bits without gradients; with
    gradients of many rows, see `trained_linear`."""
    weight: Any = self.weight
    bias: Any = self.bias
    # In an exported graph the number of tokens would become a constraint.
    if not torch.is_grad_enabled() and not torch.compiler.is_exporting():
        few = math.prod(x.shape[:-1]) <= _FEW_ROWS
        # The batch-invariant mode's products are ours.
        if (few or invariance.watched) and _fits(x, weight):
            return tiercel.linear_act(x, weight, bias, activation="none")  # type: ignore[no-any-return]
    elif torch.is_grad_enabled():
        result = trained_linear(weight, bias, x)
        if result is not None:
            return result
    return nn.functional.linear(x, weight, bias)


def _fits(x: Tensor, weight: Tensor) -> bool:
    if not (type(x) is Tensor and type(weight) in _PLAIN and x.is_cuda):
        return False
    if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") != x.dtype:
        return False
    same = x.dtype in _DTYPES and x.dtype == weight.dtype
    return same and weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0


# A bound method is pickled by the name of its function: as the module's own forward.
linear_forward.__name__ = "forward"
