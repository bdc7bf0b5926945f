# SPDX-License-Identifier: Apache-2.0
"""Linear layers in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu_squared": lambda x: functional.relu(x).square(),
}


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "gelu"
) -> Tensor:
    """As :func:`tiercel.linear_act`, for any sizes; torch rounds between product and activation."""
    return ACTIVATIONS[activation](functional.linear(x, weight, bias))
