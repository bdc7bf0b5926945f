# SPDX-License-Identifier: Apache-2.0
"""Normalisation over the last dimension in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.rms_norm`, for any sizes; float64 gives float64."""
    total = x if residual is None else x + residual
    wide = total if total.dtype == torch.float64 else total.float()
    result = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        result = result * weight
    if bias is not None:
        result = result + bias
    result = result.to(x.dtype)
    return result if residual is None else (result, total)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> Tensor | tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.layer_norm`, for any sizes; float64 gives float64."""
    total = x if residual is None else x + residual
    wide = total if total.dtype == torch.float64 else total.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    result = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        result = result * weight
    if bias is not None:
        result = result + bias
    result = result.to(x.dtype)
    return result if residual is None else (result, total)


def norm_backward(
    layer: bool,
    x: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    grad_residual: Tensor | None,
    weight_grad: bool,
    bias_grad: bool,
    bias_dtype: torch.dtype,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `layer_norm` or `rms_norm`: of x (and residual), weight and bias.

    `x` is what was normalised, `grad_residual` the gradient of the sum that was returned. What is
    not wanted has size 0.
    """
    wide, grads = (t if t.dtype == torch.float64 else t.float() for t in (x, grad))
    centred = wide - wide.mean(dim=-1, keepdim=True) if layer else wide
    rstd = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    normal = centred * rstd
    weighted = grads if weight is None else grads * weight
    grad_x = weighted - normal * (weighted * normal).mean(dim=-1, keepdim=True)
    if layer:
        grad_x = grad_x - weighted.mean(dim=-1, keepdim=True)
    grad_x = grad_x * rstd
    if grad_residual is not None:
        grad_x = grad_x + grad_residual
    leading = list(range(x.dim() - 1))
    nothing = x.new_empty(0)
    grad_weight, grad_bias = nothing, nothing.clone()
    if weight_grad:
        assert weight is not None
        product = grads * normal
        grad_weight = (product.sum(dim=leading) if leading else product).to(weight.dtype)
    if bias_grad:
        grad_bias = (grads.sum(dim=leading) if leading else grads.clone()).to(bias_dtype)
    return grad_x.to(x.dtype).contiguous(), grad_weight.contiguous(), grad_bias.contiguous()
