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


def backward(
    name: str, grad: Tensor, x: Tensor, up: Tensor | None = None, approximate: str | None = None
) -> tuple[Tensor, ...]:
    """The gradients of the function `name` in x and, where there is one, in up."""
    plain, _, gated = name.partition("_")
    gate, factor = x.chunk(2, dim=-1) if gated and up is None else (x, up)
    wide, wide_grad = _wide(gate), _wide(grad)
    value, slope_times = _DERIVATIVES[plain]
    options = {} if approximate is None else {"approximate": approximate}
    if factor is None:
        return (slope_times(wide_grad, wide, **options).to(x.dtype),)
    results = (
        slope_times(wide_grad * _wide(factor), wide, **options).to(x.dtype),
        (wide_grad * value(wide, **options)).to(x.dtype),
    )
    return (torch.cat(results, dim=-1),) if up is None else results


# The function, and the gradient in x from that of the result.
_DERIVATIVES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "silu": (functional.silu, torch.ops.aten.silu_backward.default),
    "gelu": (functional.gelu, torch.ops.aten.gelu_backward.default),
    "relu": (functional.relu, partial(torch.ops.aten.threshold_backward.default, threshold=0)),
}
