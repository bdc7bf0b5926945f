# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy, also of a linear layer's rows, and its gradient in plain PyTorch: float32
arithmetic, rounded at the end."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _classes(target: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The targets as places, and which of them are classes."""
    inside = (target >= 0) & (target < count)
    return torch.where(inside, target, 0).long(), inside


def mean_scale(target: Tensor, weight: Tensor | None = None, ignore_index: int = -100) -> Tensor:
    """``[1]``: 1 / the sum of the weights of the targets that are not ignored."""
    kept = target != ignore_index
    if weight is None:
        return 1 / kept.sum(dtype=torch.float32).view(1)
    place, inside = _classes(target, weight.shape[0])
    of_target = torch.where(inside, _wide(weight)[place], 1.0)
    return 1 / torch.where(kept, of_target, 0.0).sum().view(1)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    x = _wide(logits)
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def losses(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    scale: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The loss of each row, ``[T]``."""
    x = _capped(logits, softcap)
    count = x.shape[1]
    place, inside = _classes(target, count)
    log_p = torch.log_softmax(x, -1)
    loss = (label_smoothing - 1) * log_p.gather(1, place[:, None])[:, 0]
    if weight is not None:
        loss = loss * _wide(weight)[place]
    loss = torch.where(inside, loss, math.nan)
    if label_smoothing:
        of_all = log_p if weight is None else log_p * _wide(weight)
        loss = loss - label_smoothing / count * of_all.sum(-1)
    if z_loss:
        loss = loss + z_loss * x.logsumexp(-1).square()
    loss = torch.where(target == ignore_index, 0.0, loss)
    return loss if scale is None else loss * scale


def entropies(
    logits: Tensor, target: Tensor, ignore_index: int = -100, softcap: float | None = None
) -> Tensor:
    """The entropy of each row's distribution, ``[T]``; 0 for targets that are ignored."""
    log_p = torch.log_softmax(_capped(logits, softcap), -1)
    p = log_p.exp()
    entropy = -torch.where(p == 0, 0.0, p * log_p).sum(-1)
    return torch.where(target == ignore_index, 0.0, entropy)


def _entropy_gradient(x: Tensor, lse: Tensor) -> Tensor:
    """The gradient of the entropy of each row of logits x."""
    log_p = x - lse
    p = log_p.exp()
    none = p == 0
    entropy = -torch.where(none, 0.0, p * log_p).sum(-1, keepdim=True)
    return torch.where(none, 0.0, -p * (log_p + entropy))


def gradient(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    scale: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    entropy_scale: Tensor | None = None,
) -> Tensor:
    """The gradient of the sum of `losses`, of the shape and dtype of `logits`; and of the sum of
    `entropies` times `entropy_scale`, where that is given."""
    x = _capped(logits, softcap)
    count = x.shape[1]
    place, inside = _classes(target, count)
    lse = x.logsumexp(-1, keepdim=True)
    hit = torch.full_like(lse[:, 0], 1 - label_smoothing)
    smooth = label_smoothing / count
    all_weights: Tensor | float = count
    if weight is not None:
        hit = hit * _wide(weight)[place]
        all_weights = _wide(weight).sum()
    ignored = target == ignore_index
    hit = torch.where(inside | ignored, hit, math.nan)[:, None]
    grad = (x - lse).exp() * (hit + smooth * all_weights + 2 * z_loss * lse)
    if label_smoothing:
        grad = grad - (smooth if weight is None else smooth * _wide(weight))
    grad = grad - torch.zeros_like(grad).scatter(1, place[:, None], hit)
    slope = None if softcap is None else 1 - (x / softcap).square()
    if slope is not None:
        grad = grad * slope
    if scale is not None:
        grad = grad * scale[:, None]
    if entropy_scale is not None:
        more = entropy_scale[:, None] * _entropy_gradient(x, lse)
        grad = grad + (more if slope is None else more * slope)
    return torch.where(ignored[:, None], 0.0, grad).to(logits.dtype)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Reference of :func:`tiercel.cross_entropy`, on any device; float64 stays float64."""
    loss = losses(logits, target, weight, scale, ignore_index, label_smoothing, z_loss, softcap)
    if reduction == "none":
        return loss
    total = loss.sum()
    if reduction == "sum":
        return total
    kept = target != ignore_index
    if weight is None:
        return total / kept.sum()
    place, inside = _classes(target, weight.shape[0])
    of_target = torch.where(inside, _wide(weight)[place], 1.0)
    return total / torch.where(kept, of_target, 0.0).sum()


def linear_losses(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    scale: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The loss of each row of ``linear(x, weight, bias)``, ``[T]``; the logits are rounded to the
    dtype of x."""
    logits = torch.nn.functional.linear(x, weight, bias)
    return losses(
        logits, target, class_weight, scale, ignore_index, label_smoothing, z_loss, softcap
    )


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    return_entropy: bool = False,
    **options: Any,
) -> Any:
    """Reference of :func:`tiercel.linear_cross_entropy`, on any device, with the options of
    `cross_entropy`; float64 stays float64. It holds all logits."""
    logits = torch.nn.functional.linear(x, weight, bias)
    loss = cross_entropy(logits, target, class_weight, **options)
    if not return_entropy:
        return loss
    entropy = entropies(logits, target, options.get("ignore_index", -100), options.get("softcap"))
    return loss, entropy if options.get("reduction") == "none" else entropy.detach()
