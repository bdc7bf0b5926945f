# SPDX-License-Identifier: Apache-2.0
"""The gradients of linear_act and gated_linear: the activation's slope, then two products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._op import Backend, Op
from tiercel.core import platform
from tiercel.core.checks import check_dtype, check_rank, check_same_device, check_shape
from tiercel.core.platform import Reason
from tiercel.ops.linear.reference import ACTIVATIONS

_NAME = "linear_act_backward"
_DTYPES = (torch.bfloat16, torch.float16)

# The operators of an activation's gradient, by (gradient, what it was taken of, option).
_SLOPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "relu": ("relu", ()),
    "silu": ("silu", ()),
    "gelu": ("gelu", ("none",)),
    "gelu_tanh": ("gelu", ("tanh",)),
}


def _operator(of_weight: bool) -> Op:
    """grad[M, N] @ weight[N, K], or grad[M, N].T @ x[M, K]."""
    name = f"{_NAME}_{'weight' if of_weight else 'x'}"
    other_name = "x" if of_weight else "weight"

    def check(grad: Tensor, other: Tensor, *_: Any) -> None:
        check_dtype(name, "grad", grad.dtype, _DTYPES)
        check_rank(name, "grad", grad, 2)
        check_dtype(name, other_name, other.dtype, (grad.dtype,))
        check_rank(name, other_name, other, 2)
        inner = grad.shape[0 if of_weight else 1]
        text = "[M, K]" if of_weight else "[N, K]"
        check_shape(name, other_name, other, (inner, other.shape[1]), text)
        check_same_device(name, other_name, other, "grad", grad)

    def empty(grad: Tensor, other: Tensor) -> Tensor:
        return grad.new_empty(grad.shape[1 if of_weight else 0], other.shape[1])

    def run(grad: Tensor, other: Tensor, _: Any) -> Tensor:
        out = empty(grad, other)
        if grad.shape[0] == 0:
            return out.zero_()
        _C.linear_act_grad(grad.contiguous(), other, out, of_weight)
        return out

    def plan(grad: Tensor, other: Tensor, *_: Any) -> dict[str, Any]:
        return dict(
            _C.linear_act_grad_plan(grad.contiguous(), other, empty(grad, other), of_weight)
        )

    def why_not(grad: Tensor, other: Tensor, *_: Any) -> Reason | None:
        reason = platform.why_not(grad.device)
        if reason is not None:
            return reason
        try:
            plan(grad, other)
        except NotImplementedError as error:
            return Reason(NotImplementedError, str(error).partition(": ")[2])
        return None

    def reference(grad: Tensor, other: Tensor, _: Any) -> Tensor:
        return torch.matmul(grad.t() if of_weight else grad, other)

    return Op(
        name,
        f"(Tensor grad, Tensor {other_name}, str? backend=None) -> Tensor",
        check=check,
        fake=lambda grad, other, *_: empty(grad, other),
        sm90=Backend("sm90", run, "TMA and wgmma with transposed operands", "cute", why_not),
        ref=Backend("ref", reference, "torch.matmul", "torch"),
        family=_NAME,
        describe=plan,
    )


_OF_X = _operator(False)
_OF_WEIGHT = _operator(True)


def _second(linear: Any, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """With a gradient of their own: PyTorch's formulas can be differentiated again."""
    inputs = ctx.saved_tensors[:4]
    from tiercel.ops.linear.forms import Given

    result = linear.reference(Given(*inputs, None, ctx.activation))
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(result, wanted, grad, create_graph=True))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in inputs)


def gradients(linear: Any, ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of (x, weight, bias, residual), from what the forward saved: these, and its sums if any."""
    if grad is None:
        return None, None, None, None
    if torch.is_grad_enabled():
        return _second(linear, ctx, grad)
    x, weight, bias, residual, sums = ctx.saved_tensors
    activation, name = ctx.activation, ctx.backend
    backend = name if name in ("sm90", "ref") else None
    ops: Any = torch.ops.tiercel
    found: tuple[Tensor | None, ...]
    wants = ctx.needs_input_grad[1:]  # after the flag that says how to run
    with_bias = bias is not None and wants[2]
    if not (wants[0] or wants[1] or with_bias):
        found = (None, None, None)
    else:
        if sums is None and (activation != "none" or linear.gated):  # nobody kept them
            sums = (
                ops.linear_act_no_bias(x, weight, "none", backend)
                if bias is None
                else ops.linear_act(x, weight, bias, "none", backend)
            )
        found = products(
            x, weight, sums, grad, activation, with_bias, backend, linear.gated, tuple(wants[:2])
        )
    wants_residual = residual is not None and wants[2 + (bias is not None)]
    return *found, grad if wants_residual else None


def products(
    x: Tensor,
    weight: Tensor,
    sums: Tensor | None,
    grad: Tensor,
    activation: str,
    with_bias: bool,
    backend: str | None,
    gated: bool = False,
    wants: tuple[bool, ...] = (True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias."""
    ops: Any = torch.ops.tiercel
    if sums is not None and (activation != "none" or gated):
        grad = _slope(grad, sums, activation, gated, backend)
    slope = grad.reshape(-1, grad.shape[-1]).contiguous()
    return (
        _OF_X(slope, weight, backend).view(x.shape) if wants[0] else None,
        _OF_WEIGHT(slope, x.reshape(-1, x.shape[-1]), backend) if wants[1] else None,
        ops.reduce(slope, 0, "sum", False, None, backend) if with_bias else None,
    )


def _slope(grad: Tensor, sums: Tensor, activation: str, gated: bool, backend: str | None) -> Tensor:
    """The gradient of the sums."""
    result: Tensor
    if activation not in _SLOPES:
        with torch.enable_grad():
            sums = sums.detach().requires_grad_()
            value = ACTIVATIONS[activation](sums)
        (result,) = torch.autograd.grad(value, sums, grad)
        return result
    function, option = _SLOPES[activation]
    if gated:
        operator = getattr(torch.ops.tiercel, f"{function}_and_mul_backward")
        return operator(grad, sums, None, *option, backend)[0]
    result = getattr(torch.ops.tiercel, f"{function}_backward")(grad, sums, *option, backend)
    return result
