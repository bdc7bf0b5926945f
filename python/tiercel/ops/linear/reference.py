# SPDX-License-Identifier: Apache-2.0
"""Linear layers in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tiercel.ops.linear.spec import SCALE_BLOCK, has_block_scales

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu_squared": lambda x: functional.relu(x).square(),
}


def linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "gelu",
    residual: Tensor | None = None,
) -> Tensor:
    """Reference of :func:`tiercel.linear_act`, for any sizes; torch rounds between its steps."""
    result = ACTIVATIONS[activation](functional.linear(x, weight, bias))
    return result if residual is None else result + residual


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "silu"
) -> Tensor:
    """Reference of :func:`tiercel.gated_linear`, for any sizes; torch rounds between its steps."""
    gate, up = functional.linear(x, weight, bias).chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
) -> Tensor:
    """Reference of :func:`tiercel.fp8_linear`, for any sizes; in float32, rounded once."""
    if has_block_scales(x, weight, x_scale, weight_scale):
        sums = functional.linear(*dequantized(x, weight, x_scale, weight_scale))
    else:
        sums = functional.linear(x.float(), weight.float())
        one = x_scale.numel() == 1
        sums = sums * (x_scale.view(()) if one else x_scale.reshape(*x.shape[:-1], 1))
        one = weight_scale.numel() == 1
        sums = sums * (weight_scale.view(()) if one else weight_scale.view(-1))
    if bias is not None:
        sums = sums + bias.float()
    return ACTIVATIONS[activation](sums).to(torch.bfloat16)


def dequantized(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Float32 operands from those with scales of 1x128 and 128x128 values."""
    (n, k), block = weight.shape, SCALE_BLOCK
    of_x = x_scale.repeat_interleave(block, -1)[..., :k].reshape(x.shape)
    of_weight = weight_scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:n, :k]
    return x.float() * of_x, weight.float() * of_weight


def gated_linear_fp8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "silu",
) -> Tensor:
    """Reference of :func:`tiercel.gated_linear` with scales of blocks; in float32, rounded once."""
    both = functional.linear(*dequantized(x, weight, x_scale, weight_scale))
    gate, up = (both if bias is None else both + bias.float()).chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate) * up).to(torch.bfloat16)


def fp8_linear_weight_grad(
    grad: Tensor,
    x: Tensor,
    grad_scale: Tensor,
    x_scale: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    total: Tensor | None = None,
) -> Tensor:
    """Reference of :func:`tiercel.fp8_linear_weight_grad`, for any sizes; in float32."""
    rows, columns = (
        values.float() * scale.t().repeat_interleave(SCALE_BLOCK, 1)[:, : values.shape[1]]
        for values, scale in ((grad, grad_scale), (x, x_scale))
    )
    products = rows @ columns.t()
    return products.to(dtype) if total is None else total.add_(products)


def fp8_linear_training(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Reference of :func:`tiercel.fp8_linear_training`, for any sizes, without gradients."""
    from tiercel.ops.quant.reference import fp8_quantize

    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    (x8, x_scale), (w8, w_scale) = fp8_quantize(rows, "1x128"), fp8_quantize(weight, "128x128")
    out = functional.linear(*dequantized(x8, w8, x_scale, w_scale))
    out = out if bias is None else out + bias.float()
    return out.to(torch.bfloat16).view(*x.shape[:-1], weight.shape[0])


def fused_mlp(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    gated: bool = True,
    residual: Tensor | None = None,
) -> Tensor:
    """Reference of :func:`tiercel.fused_mlp`."""
    first = gated_linear if gated else linear_act
    hidden = first(x, up_weight, up_bias, activation=activation)
    return linear_act(hidden, down_weight, down_bias, activation="none", residual=residual)
