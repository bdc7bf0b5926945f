# SPDX-License-Identifier: Apache-2.0
"""Activations, plain and gated, in plain PyTorch: float32 arithmetic, one rounding at the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional


def silu_and_mul(x: Tensor, up: Tensor | None = None, *, scale: Tensor | None = None) -> Tensor:
    """As :func:`tiercel.silu_and_mul`, on any device; float64 stays float64."""
    return _gated(functional.silu, x, up, scale)


def gelu_and_mul(
    x: Tensor,
    up: Tensor | None = None,
    *,
    approximate: str = "none",
    scale: Tensor | None = None,
) -> Tensor:
    """As :func:`tiercel.gelu_and_mul`, on any device; float64 stays float64."""
    return _gated(partial(functional.gelu, approximate=approximate), x, up, scale)


def relu_and_mul(x: Tensor, up: Tensor | None = None, *, scale: Tensor | None = None) -> Tensor:
    """As :func:`tiercel.relu_and_mul`, on any device; float64 stays float64."""
    return _gated(functional.relu, x, up, scale)


def silu(x: Tensor, *, scale: Tensor | None = None) -> Tensor:
    """As :func:`tiercel.silu`, on any device; float64 stays float64."""
    return _rounded(functional.silu(_wide(x)), x.dtype, scale)


def gelu(x: Tensor, *, approximate: str = "none", scale: Tensor | None = None) -> Tensor:
    """As :func:`tiercel.gelu`, on any device; float64 stays float64."""
    return _rounded(functional.gelu(_wide(x), approximate=approximate), x.dtype, scale)


def relu(x: Tensor, *, scale: Tensor | None = None) -> Tensor:
    """As :func:`tiercel.relu`, on any device; float64 stays float64."""
    return _rounded(functional.relu(_wide(x)), x.dtype, scale)


def _gated(
    function: Callable[[Tensor], Tensor], x: Tensor, up: Tensor | None, scale: Tensor | None
) -> Tensor:
    gate, factor = x.chunk(2, dim=-1) if up is None else (x, up)
    return _rounded(function(_wide(gate)) * _wide(factor), x.dtype, scale)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rounded(result: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    if scale is None:
        return result.to(dtype)
    largest = torch.finfo(torch.float8_e4m3fn).max
    return (result * scale.reciprocal()).clamp(-largest, largest).to(torch.float8_e4m3fn)
