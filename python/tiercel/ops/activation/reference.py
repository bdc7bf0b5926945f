# SPDX-License-Identifier: Apache-2.0
"""Activations, plain and gated, in plain PyTorch: float32 arithmetic, one rounding at the end.

The tails keep relative exactness, where torch.nn.functional's become 0 too early: its exponential
overflows at 88.7, and 1 + erf or 1 + tanh cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional


def silu_and_mul(x: Tensor, up: Tensor | None = None, *, scale: Tensor | None = None) -> Tensor:
    """Reference of :func:`tiercel.silu_and_mul`, on any device; float64 stays float64."""
    return _gated(_silu, x, up, scale)


def gelu_and_mul(
    x: Tensor,
    up: Tensor | None = None,
    *,
    approximate: str = "none",
    scale: Tensor | None = None,
) -> Tensor:
    """Reference of :func:`tiercel.gelu_and_mul`, on any device; float64 stays float64."""
    return _gated(partial(_gelu, approximate=approximate), x, up, scale)


def relu_and_mul(x: Tensor, up: Tensor | None = None, *, scale: Tensor | None = None) -> Tensor:
    """Reference of :func:`tiercel.relu_and_mul`, on any device; float64 stays float64."""
    return _gated(functional.relu, x, up, scale)


def silu(x: Tensor, *, scale: Tensor | None = None) -> Tensor:
    """Reference of :func:`tiercel.silu`, on any device; float64 stays float64."""
    return _rounded(_silu(_wide(x)), x.dtype, scale)


def gelu(x: Tensor, *, approximate: str = "none", scale: Tensor | None = None) -> Tensor:
    """Reference of :func:`tiercel.gelu`, on any device; float64 stays float64."""
    return _rounded(_gelu(_wide(x), approximate), x.dtype, scale)


def relu(x: Tensor, *, scale: Tensor | None = None) -> Tensor:
    """Reference of :func:`tiercel.relu`, on any device; float64 stays float64."""
    return _rounded(functional.relu(_wide(x)), x.dtype, scale)


def _sigmoid_times(z: Tensor, x: Tensor) -> Tensor:
    """x * sigmoid(z)."""
    root = (z / 2).clamp_max(0).exp()  # exp(z) itself may be a subnormal number
    return torch.where(z < -64, x * root * root, x * z.sigmoid())


def _silu(x: Tensor) -> Tensor:
    return _sigmoid_times(x, x)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return _sigmoid_times(_two_u(x), x) if approximate == "tanh" else x * _normal_cdf(x)


def _two_u(x: Tensor) -> Tensor:
    """The argument of gelu by tanh: x * sigmoid(two_u) is 0.5 * x * (1 + tanh(u))."""
    return math.sqrt(8 / math.pi) * x * (1 + 0.044715 * x * x)


def _bell(x: Tensor) -> Tensor:
    """exp(-x^2 / 2), without what x^2 is rounded by."""
    x = x.clamp(-40, 40)
    high = ((x * 16).round() / 16).detach()
    return (-0.5 * high * high).exp() * (-0.5 * (x - high) * (x + high)).exp()


def _normal_cdf(x: Tensor) -> Tensor:
    distance = torch.where(x < 0, -x, x)  # abs() has no slope at 0
    tail = 0.5 * torch.special.erfcx(math.sqrt(0.5) * distance) * _bell(x)
    return torch.where(x < 0, tail, 1 - tail)


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


def _silu_slope_times(grad: Tensor, x: Tensor) -> Tensor:
    sigmoid = _sigmoid_times(x, torch.ones_like(x))
    return grad * (sigmoid + _silu(x) * (1 - sigmoid))


def _gelu_slope_times(grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return grad * (_normal_cdf(x) + x * _bell(x) * math.sqrt(0.5 / math.pi))
    z = _two_u(x)
    sigmoid = _sigmoid_times(z, torch.ones_like(x))
    slope = math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return grad * (sigmoid + _sigmoid_times(z, x) * (1 - sigmoid) * slope)


# The function, and the gradient in x from that of the result.
_DERIVATIVES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "silu": (_silu, _silu_slope_times),
    "gelu": (_gelu, _gelu_slope_times),
    "relu": (functional.relu, partial(torch.ops.aten.threshold_backward.default, threshold=0)),
}
