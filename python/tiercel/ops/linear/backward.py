# SPDX-License-Identifier: Apache-2.0
"""The gradients of linear_act and gated_linear: the activation's slope, then two products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.op import Native, Op
from tiercel.core.spec import Call, Spec
from tiercel.ops.linear import reference
from tiercel.ops.linear.spec import BACKWARD_WEIGHT, BACKWARD_X

# The activation whose backward operator is used, and its options.
_SLOPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "relu": ("relu", ()),
    "silu": ("silu", ()),
    "gelu": ("gelu", ("none",)),
    "gelu_tanh": ("gelu", ("tanh",)),
}


def _operator(declared: Spec, of_weight: bool) -> Op:
    other, result = declared.names[1], declared.result_names[0]

    def launch(native: Callable[..., Any], call: Call) -> Any:
        if call.grad.shape[0] == 0 and native is _C.linear_act_grad:
            return getattr(call, result).zero_()
        call.grad = call.grad.contiguous()
        return op.launch(native, call)

    op = Op(
        declared,
        sm90=Native(
            _C.linear_act_grad,
            _C.linear_act_grad_plan,
            ("grad", other, result, of_weight),
            "TMA and wgmma with transposed operands",
            "cute",
            contiguous=("grad",),
            launch=launch,
            direct=not of_weight,  # with no rows, that gradient is filled with zeros
        ),
        reference=lambda call: torch.matmul(
            call.grad.t() if of_weight else call.grad, getattr(call, other)
        ),
        method="torch.matmul",
        out=False,
    )
    return op


_OF_X = _operator(BACKWARD_X, False)
_OF_WEIGHT = _operator(BACKWARD_WEIGHT, True)


def save(ctx: Any, call: Call, results: Any) -> None:
    ctx.activation, ctx.backend = call.activation, call.backend
    residual = getattr(call, "residual", None)
    kept = None
    if isinstance(results, tuple):
        kept = results[1]
        ctx.mark_non_differentiable(kept)
    elif call.activation == "relu" and residual is None:
        kept = results  # positive where its preactivation is
    ctx.save_for_backward(call.x, call.weight, call.bias, residual, kept)


def _differentiable(gated: bool, ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
    """Gradients that have a gradient themselves: PyTorch's formulas can be differentiated again."""
    x, weight, bias, residual = ctx.saved_tensors[:4]
    if gated:
        result = reference.gated_linear(x, weight, bias, activation=ctx.activation)
    else:
        result = reference.linear_act(x, weight, bias, activation=ctx.activation, residual=residual)
    named = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    wanted = {name: t for name, t in named.items() if t is not None and t.requires_grad}
    found = torch.autograd.grad(result, tuple(wanted.values()), grad, create_graph=True)
    return dict(zip(wanted, found, strict=True))


def gradients(
    gated: bool, ctx: Any, grad: Tensor | None, _: Tensor | None = None
) -> dict[str, Tensor | None]:
    """By argument, from what `save` kept."""
    if grad is None:
        return {}
    if torch.is_grad_enabled():
        return _differentiable(gated, ctx, grad)
    x, weight, bias, residual, kept = ctx.saved_tensors
    backend = ctx.backend if ctx.backend in ("sm90", "ref") else None
    wants = {"bias": False, **ctx.wants}
    found: dict[str, Tensor | None] = {}
    if wants["x"] or wants["weight"] or wants["bias"]:
        if kept is None and (ctx.activation != "none" or gated):
            kept = torch.ops.tiercel.linear_act(x, weight, bias, "none", None, backend)
        of_layer = products(
            *(x, weight, kept, grad, ctx.activation, wants["bias"], backend, gated),
            wants=(wants["x"], wants["weight"]),
        )
        found = dict(zip(("x", "weight", "bias"), of_layer, strict=True))
    if residual is not None and wants["residual"]:
        found["residual"] = grad
    return found


def products(
    x: Tensor,
    weight: Tensor,
    kept: Tensor | None,
    grad: Tensor,
    activation: str,
    with_bias: bool,
    backend: str | None,
    gated: bool = False,
    wants: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias; `kept` is the preactivation, or ReLU's result."""
    if kept is not None and (activation != "none" or gated):
        grad = _slope(grad, kept, activation, gated, backend)
    slope = grad.reshape(-1, grad.shape[-1]).contiguous()
    reduce = torch.ops.tiercel.reduce
    return (
        _OF_X(slope, weight, backend).view(x.shape) if wants[0] else None,
        _OF_WEIGHT(slope, x.reshape(-1, x.shape[-1]), backend) if wants[1] else None,
        reduce(slope, 0, "sum", False, None, backend) if with_bias else None,
    )


def _slope(
    grad: Tensor, preactivation: Tensor, activation: str, gated: bool, backend: str | None
) -> Tensor:
    """The gradient of the preactivation."""
    result: Tensor
    if activation not in _SLOPES:
        with torch.enable_grad():
            preactivation = preactivation.detach().requires_grad_()
            value = reference.ACTIVATIONS[activation](preactivation)
        (result,) = torch.autograd.grad(value, preactivation, grad)
        return result
    function, option = _SLOPES[activation]
    if gated:
        operator = getattr(torch.ops.tiercel, f"{function}_and_mul_backward")
        return operator(grad, preactivation, None, *option, backend)[0]
    result = getattr(torch.ops.tiercel, f"{function}_backward")(
        grad, preactivation, *option, backend
    )
    return result
