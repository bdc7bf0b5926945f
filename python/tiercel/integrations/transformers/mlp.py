# SPDX-License-Identifier: Apache-2.0
"""Gated MLPs in training: ``down(act(gate(x)) * up(x))`` as one function of autograd.

The activation's result is large and cheap to compute, so it is not saved: the kernel of the
activation's gradients recomputes it from what it reads anyway. The second product adds the two
gradients of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

import tiercel
from tiercel.integrations.transformers.linear import linear_forward

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Activation:
    """A gated activation of Tiercel's, and its gradients.

    Args:
        name: ``silu_and_mul`` or another one of its kind.
        options: The function's, all of them.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._name, self._options = name, options

    def __call__(self, gate: Tensor, up: Tensor | None) -> Tensor:
        return getattr(tiercel, self._name)(gate, up, **self._options)  # type: ignore[no-any-return]

    def gradients(
        self, grad: Tensor, gate: Tensor, up: Tensor | None, result: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """Those of gate and up, and the activation again where its `result` is wanted."""
        kind = "backward_and_result" if result else "backward"
        operator = getattr(torch.ops.tiercel, f"{self._name}_{kind}")
        of_gate, of_up, *again = operator(grad, gate, up, *self._options.values(), None)
        return [of_gate] if up is None else [of_gate, of_up], again[0] if result else None


def has_hooks(module: nn.Module) -> bool:
    """True if something is to see the module's calls or their gradients."""
    return any(getattr(module, name) for name in _HOOKS)


def trained(x: Tensor, layers: Sequence[Any], activation: Activation) -> Tensor | None:
    """The MLP's result by `_GatedMLP`, or None where that does not do what the layers do.

    `layers` are those before the activation, one or two, and that behind it. A graph's compiler
    decides itself what it keeps.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    if nn.modules.module._has_any_global_hook():
        return None
    if type(x) is not Tensor or x.dtype not in _FLOATS or x.numel() == 0:
        return None
    tensors: list[Tensor | None] = []
    for layer in layers:
        if type(layer) is not nn.Linear or has_hooks(layer):
            return None
        forward = vars(layer).get("forward")
        if forward is not None and getattr(forward, "__func__", None) is not linear_forward:
            return None  # not by its names, which a wrapper copies
        weight, bias = layer.weight, layer.bias
        if type(weight) is not nn.Parameter or weight.dtype != x.dtype:
            return None
        tensors += [weight, bias]
    if torch.is_autocast_enabled(x.device.type) or torch._C._are_functorch_transforms_active():
        return None
    if forward_ad._current_level >= 0:  # inside a dual level
        return None
    if not any(t is not None and t.requires_grad for t in (x, *tensors)):
        return None
    return _GatedMLP.apply(activation, x, *tensors)  # type: ignore[no-any-return]


class _GatedMLP(torch.autograd.Function):
    """The MLP of an `Activation`, x, and weight and bias (or None) of each layer, those of the last
    one at the end."""

    @staticmethod
    def forward(ctx: Any, activation: Activation, x: Tensor, *tensors: Tensor | None) -> Tensor:
        *before, (weight, bias) = _pairs(tensors)
        made = [functional.linear(x, w, b) for w, b in before]
        gate, up = made if len(made) == 2 else (made[0], None)
        ctx.activation = activation
        ctx.save_for_backward(x, gate, up, *tensors)
        return functional.linear(activation(gate, up), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, *tensors = ctx.saved_tensors
        wants = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # of a gradient: PyTorch can differentiate its own formulas
            return None, *_differentiable(ctx.activation, (x, *tensors), wants, grad)
        shape, (wants_x, *of_layers) = x.shape, wants
        *wants_before, wants_last = _pairs(of_layers)
        *before, (weight, _) = _pairs(tensors)
        grad, gate, x = (t.reshape(-1, t.shape[-1]) for t in (grad, gate, x))
        up = up if up is None else up.reshape(gate.shape)
        slopes: list[Tensor] = []
        inner = None
        if wants_x or any(map(any, wants_before)):
            slopes, inner = ctx.activation.gradients(grad @ weight, gate, up, wants_last[0])
        elif wants_last[0]:
            inner = ctx.activation(gate, up)
        last = _of_layer(grad, inner, wants_last)
        del inner, gate, up
        of_x: Tensor | None = None
        found: list[Tensor | None] = []
        for (w, _), wanted in zip(before, wants_before, strict=True):
            slope = slopes.pop(0) if slopes else None
            if wants_x:
                assert slope is not None
                of_x = slope @ w if of_x is None else of_x.addmm_(slope, w)
            found += _of_layer(slope, x, wanted)
        return None, None if of_x is None else of_x.view(shape), *found, *last


def _pairs(values: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(values[::2], values[1::2], strict=True))


def _of_layer(
    grad: Tensor | None, x: Tensor | None, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a layer's weight and bias."""
    if grad is None:
        return None, None
    return (
        grad.t() @ x if wanted[0] and x is not None else None,
        grad.sum(0) if wanted[1] else None,
    )


def _differentiable(
    activation: Activation,
    inputs: Sequence[Tensor | None],
    wants: Sequence[bool],
    grad: Tensor,
) -> list[Tensor | None]:
    # Views, since one tensor may be given twice, and each place has a gradient of its own.
    own = [
        t.view_as(t) if t is not None and want else t for t, want in zip(inputs, wants, strict=True)
    ]
    x, tensors = own[0], own[1:]
    *before, (weight, bias) = _pairs(tensors)
    made = [functional.linear(x, w, b) for w, b in before]
    inner = activation(made[0], made[1] if len(made) == 2 else None)
    result = functional.linear(inner, weight, bias)
    of = [t for t, want in zip(own, wants, strict=True) if want]
    found = iter(torch.autograd.grad(result, of, grad, create_graph=True))
    return [next(found) if want else None for want in wants]
