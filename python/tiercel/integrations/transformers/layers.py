# SPDX-License-Identifier: Apache-2.0
"""Decoder layers in training: ``s = x + attention(norm(x)); s + mlp(norm(s))`` with the additions
in the norms' kernels.

The forward adds before the second norm. In the backward both norms' kernels also add the residual's
gradient, which saves a pass over three tensors each.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import tiercel
from tiercel.integrations.transformers.forwards import is_replaced
from tiercel.integrations.transformers.mlp import has_hooks

# With fewer rows a pass takes less time than the host does for this.
_LEAST_ROWS = 4096
_DTYPES = (torch.bfloat16, torch.float16)
_NORMS = ("input_layernorm", "post_attention_layernorm")
_CHILDREN = {*_NORMS, "self_attn", "mlp"}
# On a forward of `replace`: the epsilon of a norm that is `rms_norm` of its weight.
EPSILON = "tiercel_epsilon"


def layer_forward(module: nn.Module) -> Callable[..., Any] | str | None:
    """The forward of such a layer, or None."""
    if set(dict(module.named_children())) != _CHILDREN or not _computes_it(module):
        return None
    if is_replaced(module):
        return "its forward is replaced already"
    return _forward_with(_stated(module), _checkpoints_itself(module))


def _forward_with(stated: dict[str, Any], checkpoints: bool) -> Callable[..., Any]:
    """The forward of layers that call attention with these arguments if their caller does not.
    The layers' own forward runs if it `checkpoints` and checkpointing is on."""

    # A bound method is pickled by the name of its function: as the module's own forward.
    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        own = args or (checkpoints and self.gradient_checkpointing)
        epsilons = None if own else _epsilons(self, hidden_states)
        if epsilons is None:
            return type(self).forward(self, hidden_states, *args, **kwargs)
        first, second = (getattr(self, name) for name in _NORMS)
        normed, stream = _Norm.apply(hidden_states, first.weight, epsilons[0])
        given = {**stated, **kwargs, "hidden_states": normed}
        attended, _ = self.self_attn(**given)  # type: ignore[operator]
        normed, stream = tiercel.rms_norm(attended, second.weight, eps=epsilons[1], residual=stream)
        return stream + self.mlp(normed)  # type: ignore[operator]

    return forward


def _stated(layer: nn.Module) -> dict[str, Any]:
    """The defaults of the layer's arguments that its attention lacks, or has others of."""
    own = inspect.signature(type(layer).forward).parameters
    of_attention = inspect.signature(type(layer.self_attn).forward).parameters
    return {
        name: p.default
        for name, p in own.items()
        if name in of_attention
        and p.default is not p.empty
        and p.default is not of_attention[name].default
    }


def _epsilons(layer: nn.Module, x: Tensor) -> list[float] | None:
    """The norms' epsilons, or None where the layer's own forward is to run."""
    # In training also without a graph: a checkpoint runs the layer again with one, and a mixture
    # would choose other experts if its rounding were different then.
    if not (torch.is_grad_enabled() or layer.training) or torch.compiler.is_compiling():
        return None
    if type(x) is not Tensor or x.dtype not in _DTYPES:
        return None
    # Without a graph nobody knows if there will be one for x: the layer before may have made it.
    if torch.is_grad_enabled() and not x.requires_grad:
        return None
    if math.prod(x.shape[:-1]) < _LEAST_ROWS or nn.modules.module._has_any_global_hook():
        return None
    if torch.is_autocast_enabled(x.device.type) or torch._C._are_functorch_transforms_active():
        return None
    if forward_ad._current_level >= 0:  # inside a dual level
        return None
    found = []
    for name in _NORMS:
        norm = getattr(layer, name)
        function = getattr(vars(norm).get("forward"), "__func__", None)
        # A wrapper has the attributes of what it wraps.
        epsilon = None if hasattr(function, "__wrapped__") else getattr(function, EPSILON, None)
        weight = norm._parameters.get("weight")
        if epsilon is None or type(weight) is not nn.Parameter or weight.dtype != x.dtype:
            return None
        if has_hooks(norm):
            return None
        found.append(epsilon)
    return found


class _Norm(torch.autograd.Function):
    """x, weight and epsilon: the norm's result, and x for what comes past it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return tiercel.rms_norm(x, weight, eps=eps), x.view_as(x)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, past: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        if grad is None:
            return past, None, None
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # of a gradient: PyTorch can differentiate the norm's own
            of = [t.view_as(t) for t in (x, weight)]
            result = tiercel.rms_norm(*of, eps=ctx.eps)
            of_x, of_weight = torch.autograd.grad(result, of, grad, create_graph=True)
            return of_x if past is None else of_x + past, of_weight, None
        of_x, of_weight, _ = torch.ops.tiercel.rms_norm_backward(
            x, weight, grad, past, wants_weight, False, x.dtype, ctx.eps
        )
        return of_x if wants_x else None, of_weight if wants_weight else None, None


# The tests of a module's forward on small tensors.


class _Line(nn.Module):
    """Stands for a part of a layer: a linear function. Attention's keeps what it was given."""

    def __init__(self, factor: float, pair: bool = False) -> None:
        super().__init__()
        self.factor, self.pair = factor, pair
        self.given: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        self.given = kwargs
        found = hidden_states * self.factor + 1
        return (found, None) if self.pair else found


def _with_lines(module: nn.Module) -> tuple[Any, list[_Line]]:
    """A copy in training mode with other parts: both norms, attention, and the MLP."""
    parts = [_Line(0.5), _Line(-1.5), _Line(2.0, pair=True), _Line(3.0)]
    small: Any = copy.copy(module)
    small._modules = dict(zip((*_NORMS, "self_attn", "mlp"), parts, strict=True))
    small.training = True
    return small, parts


def _names(module: nn.Module) -> list[str]:
    """Those of the forward's arguments behind the hidden states."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[2:]
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _computes_it(module: nn.Module) -> bool:
    """Runs the forward on small tensors with other parts, in training mode: it computes this, and
    calls attention with all other arguments as they are."""
    small, (first, second, attend, mlp) = _with_lines(module)
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    given = {name: object() for name in (*_names(module), "an_argument_that_it_does_not_name")}
    try:
        with torch.no_grad():
            found = type(module).forward(small, x, **given)
    except Exception:  # whatever a stranger's module raises
        return False
    if attend.given != given:
        return False
    stream = x + attend(first(x))[0]
    due = stream + mlp(second(stream))
    return isinstance(found, Tensor) and found.shape == due.shape and torch.allclose(found, due)


def _checkpoints_itself(module: nn.Module) -> bool:
    """True if the class's forward, not its call, is what makes a checkpoint of the layer."""
    found: list[Any] = []

    def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
        found.append(function)
        return function(*args)

    small, _ = _with_lines(module)
    small.gradient_checkpointing = True
    small._gradient_checkpointing_func = checkpoint
    with torch.enable_grad():
        type(module).forward(small, torch.zeros(1, 1, 8), **dict.fromkeys(_names(module)))
    return bool(found)
