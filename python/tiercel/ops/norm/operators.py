# SPDX-License-Identifier: Apache-2.0
"""The operators behind rms_norm and layer_norm: one for each choice of optional tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tiercel import _C, _platform
from tiercel._checks import check_contiguous, check_dtype, check_same_device, check_shape
from tiercel._eager import empty
from tiercel._launcher import Argument, Like, Output, launcher
from tiercel._op import Autograd, Backend, Op
from tiercel._platform import Reason
from tiercel.ops.norm import reference as ref

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Bytes of a row of which a cluster's shared memory holds that of three tensors, and the weight.
_LONGEST_OF_THREE = 98304 * 4


def _check_like_x(name: str, what: str, tensor: Tensor, x: Tensor) -> None:
    check_dtype(name, what, tensor.dtype, (x.dtype,))
    check_shape(name, what, tensor, x.shape, "[..., N]")
    check_same_device(name, what, tensor, "x", x)


def _check_parameter(name: str, what: str, tensor: Tensor, x: Tensor) -> None:
    check_dtype(name, what, tensor.dtype, tuple(dict.fromkeys((x.dtype, torch.float32))))
    check_shape(name, what, tensor, x.shape[-1:], "[N]")
    check_same_device(name, what, tensor, "x", x)
    check_contiguous(name, what, tensor)


def check_eps(name: str, eps: float) -> None:
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"{name}: `eps` must be a float, got {type(eps).__name__}")
    if not eps >= 0:
        raise ValueError(f"{name}: `eps` must not be negative, got {eps}")


def _check_inputs(
    name: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
) -> None:
    check_dtype(name, "x", x.dtype, _DTYPES)
    if x.dim() < 1:
        raise ValueError(f"{name}: `x` must have at least 1 dimension, got 0")
    if x.shape[-1] < 1:
        raise ValueError(f"{name}: `x` must have at least 1 column, got {list(x.shape)}")
    for what, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            _check_parameter(name, what, parameter, x)
    if residual is not None:
        _check_like_x(name, "residual", residual, x)
    check_eps(name, eps)


def _like(x: Tensor) -> Tensor:
    out: Tensor = empty(x, tuple(x.shape), x.dtype)
    return out


def _rows(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.reshape(-1, tensor.shape[-1])


@dataclass(frozen=True)
class _Launches:
    """A norm's functions in `_C`, and what they compute in plain PyTorch."""

    name: str
    eps: float
    layer: bool
    forward: Callable[..., None]
    forward_plan: Callable[..., Any]
    backward: Callable[..., None]
    backward_plan: Callable[..., Any]
    reference: Callable[..., Any]

    def into(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor,
        residual_out: Tensor | None,
        eps: float,
    ) -> None:
        if x.dim() > 2 and not (
            x.is_contiguous() and (residual is None or residual.is_contiguous())
        ):
            x, residual = x.reshape(-1, x.shape[-1]), _rows(residual)
            out, residual_out = out.view(x.shape), _rows(residual_out)
        self.forward(x, weight, bias, residual, out, residual_out, eps)

    def plan(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        eps: float,
    ) -> dict[str, Any]:
        rows, residual = x.reshape(-1, x.shape[-1]), _rows(residual)
        out = _like(rows)
        residual_out = None if residual is None else out
        return dict(self.forward_plan(rows, weight, bias, residual, out, residual_out, eps))

    def why_not(self, x: Tensor, *rest: Any) -> Reason | None:
        reason = _platform.why_not(x.device)
        if reason is not None:
            return reason
        weight, bias, residual, eps = rest
        try:
            few = None if residual is None else _rows(residual)[:2]  # type: ignore[index]
            self.plan(x.reshape(-1, x.shape[-1])[:2], weight, bias, few, eps)
        except NotImplementedError as error:
            return Reason(NotImplementedError, str(error).removeprefix(f"{self.name}: "))
        return None

    def gradients(
        self,
        x: Tensor,
        weight: Tensor | None,
        grad: Tensor,
        grad_residual: Tensor | None,
        weight_grad: bool,
        bias_grad: bool,
        bias_dtype: torch.dtype,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The kernels' gradients of x, weight and bias; of size 0 those that are not wanted."""
        x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
        grad_residual = _rows(grad_residual)
        if grad_residual is not None and x.shape[1] * x.element_size() > _LONGEST_OF_THREE:
            options = (weight_grad, bias_grad, bias_dtype, eps)
            grad_x, *others = self.gradients(x, weight, grad, None, *options)
            return (grad_x.add_(grad_residual), *others)  # type: ignore[return-value]
        grad_x, columns = _like(x), x.shape[1]
        grad_weight = grad_bias = workspace = None
        sum_bias = (
            bias_grad and not self.layer
        )  # RMS norms seldom have one: no kernel keeps its sums
        bias_grad = bias_grad and self.layer
        if weight_grad or bias_grad:
            plan = self.backward_plan(x, weight, grad, grad_residual, grad_x, None, None, None, eps)
            workspace = x.new_empty((2, plan["parts"], columns), dtype=torch.float32)
        if weight_grad:
            assert weight is not None
            grad_weight = torch.empty_like(weight)
        if bias_grad:
            grad_bias = x.new_empty(columns, dtype=bias_dtype)
        self.backward(
            x, weight, grad, grad_residual, grad_x, grad_weight, grad_bias, workspace, eps
        )
        if sum_bias:
            grad_bias = grad.sum(dim=0, dtype=torch.float32).to(bias_dtype)
        nothing = x.new_empty(0)
        return (
            grad_x,
            nothing if grad_weight is None else grad_weight,
            nothing.clone() if grad_bias is None else grad_bias,
        )


RMS = _Launches(
    "rms_norm",
    1e-6,
    False,
    _C.rms_norm,
    _C.rms_norm_plan,
    _C.rms_norm_backward,
    _C.rms_norm_backward_plan,
    ref.rms_norm,
)
LAYER = _Launches(
    "layer_norm",
    1e-5,
    True,
    _C.layer_norm,
    _C.layer_norm_plan,
    _C.layer_norm_backward,
    _C.layer_norm_backward_plan,
    ref.layer_norm,
)

_CUDA = ("a row in registers, read once; statistics in float32", "cuda")
_TORCH = ("mean, square and rsqrt in float32", "torch")


def _splitter(present: tuple[bool, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """(x, then of weight, bias and residual those that are present, ...) -> with None for others.

    An operator's tensors come first and none is optional, so that all of them are looked at: there
    is one for each choice.
    """
    places = [None] * len(present)
    place = 1
    for i, there in enumerate(present):
        if there:
            places[i] = place  # type: ignore[call-overload]
            place += 1

    def split(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0], *[None if p is None else args[p] for p in places], *args[place:])

    return split


_OPTIONAL = ("weight", "bias", "residual")


def _suffix(names: tuple[str, ...], present: tuple[bool, ...]) -> str:
    return "".join(f"_no_{name}" for name, there in zip(names, present, strict=True) if not there)


def _signature(names: tuple[str, ...], present: tuple[bool, ...]) -> str:
    return "Tensor x" + "".join(
        f", Tensor {name}" for name, there in zip(names, present, strict=True) if there
    )


def _backward_operator(norm: _Launches, present: tuple[bool, bool]) -> Op:
    """Gradients: x, then weight and grad_residual if present, grad, which are wanted."""
    names = ("weight", "grad_residual")
    split = _splitter(present)

    def arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, weight, grad_residual, grad, *rest = split(args)
        return (x, weight, grad, grad_residual, *rest[:-1])

    def check(*args: Any) -> None:
        x, weight, grad, grad_residual, *_, eps = arguments(args)
        _check_inputs(norm.name, x, weight, None, None, eps)
        _check_like_x(norm.name, "grad", grad, x)
        if grad_residual is not None:
            _check_like_x(norm.name, "grad_residual", grad_residual, x)

    def fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, _, _, weight_grad, bias_grad, bias_dtype, _ = arguments(args)
        columns = x.shape[-1]
        return (
            _like(x),
            x.new_empty(columns, dtype=weight.dtype) if weight_grad else x.new_empty(0),
            x.new_empty(columns, dtype=bias_dtype) if bias_grad else x.new_empty(0),
        )

    def sm90(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        grad_x, *others = norm.gradients(*arguments(args))
        return (grad_x.view(args[0].shape), *others)  # type: ignore[return-value]

    def reference(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return ref.norm_backward(norm.layer, *arguments(args))

    def why_not(*args: Any) -> Reason | None:
        x, weight, *_, eps = arguments(args)
        return norm.why_not(x, weight, None, None, eps)

    return Op(
        f"{norm.name}_backward{_suffix(names, present)}",
        f"({_signature(names, present)}, Tensor grad, bool weight_grad, bool bias_grad,"
        " ScalarType bias_dtype, float eps, str? backend=None) -> (Tensor, Tensor, Tensor)",
        check=check,
        fake=fake,
        sm90=Backend("sm90", sm90, *_CUDA, why_not=why_not),
        ref=Backend("ref", reference, *_TORCH),
        family=norm.name,
    )


def _operator(norm: _Launches, present: tuple[bool, ...], backward: dict[Any, Op]) -> Op:
    split = _splitter(present)
    has_weight, has_bias, has_residual = present

    def check(*args: Any) -> None:
        _check_inputs(norm.name, *split(args)[:-1])

    def fake(*args: Any) -> Any:
        out = _like(args[0])
        return (out, _like(args[0])) if has_residual else out

    def sm90(*args: Any) -> Any:
        x, weight, bias, residual, eps, _ = split(args)
        out = _like(x)
        residual_out = _like(x) if has_residual else None
        norm.into(x, weight, bias, residual, out, residual_out, eps)
        return (out, residual_out) if has_residual else out

    count = 1 + sum(present) + 2
    x, *parameters, eps, _ = split(tuple(map(Argument, range(count))))
    run = launcher(
        norm.forward,
        (x, *parameters, Output(0), Output(1) if has_residual else None, eps),
        count=count,
        dense=(x, parameters[2]) if has_residual else (x,),
        outputs=(Like(x),) * (1 + has_residual),
        otherwise=sm90,
    )

    def reference(*args: Any) -> Any:
        x, weight, bias, residual, eps, _ = split(args)
        result = norm.reference(x, weight, bias, residual, eps=eps)
        if isinstance(result, tuple):
            return tuple(each.contiguous() for each in result)
        return result.contiguous()

    def save(ctx: Any, args: tuple[Any, ...], outputs: Any) -> None:
        x, weight, bias, _, ctx.eps, ctx.backend = split(args)
        ctx.bias_dtype = x.dtype if bias is None else bias.dtype
        ctx.save_for_backward(outputs[1] if has_residual else x, weight)

    def gradients(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        wants = ctx.needs_input_grad[1:]  # after the flag that says how to run
        weight_grad = has_weight and wants[1]
        bias_grad = has_bias and wants[1 + has_weight]
        grad_residual = grads[0] if has_residual else None
        if grad is None:
            grad_x, grad_weight, grad_bias = grad_residual, None, None
        else:
            x, weight = ctx.saved_tensors
            options = (weight_grad, bias_grad, ctx.bias_dtype, ctx.eps)
            if torch.is_grad_enabled():  # it will be differentiated itself
                arguments = (norm.layer, x, weight, grad, grad_residual, *options)
                grad_x, grad_weight, grad_bias = ref.norm_backward(*arguments)
            else:
                tensors = [t for t in (x, weight, grad_residual) if t is not None]
                op = backward[weight is not None, grad_residual is not None]
                grad_x, grad_weight, grad_bias = op(*tensors, grad, *options, ctx.backend)
        result = [grad_x]
        result += [grad_weight if weight_grad else None] if has_weight else []
        result += [grad_bias if bias_grad else None] if has_bias else []
        result += [grad_x] if has_residual else []
        return tuple(result)

    outputs = "(Tensor out, Tensor residual_out)" if has_residual else "Tensor"
    return Op(
        norm.name + _suffix(_OPTIONAL, present),
        f"({_signature(_OPTIONAL, present)}, float eps={norm.eps}, str? backend=None) -> {outputs}",
        check=check,
        fake=fake,
        sm90=Backend("sm90", run, *_CUDA, why_not=lambda *args: norm.why_not(*split(args)[:-1])),
        ref=Backend("ref", reference, *_TORCH),
        autograd=Autograd(save, gradients),
        family=norm.name,
        describe=lambda *args: norm.plan(*split(args)[:-1]),
        load=_C.norm_load if all(present) else None,
    )


def _out_operator(norm: _Launches, present: tuple[bool, ...]) -> Op:
    split = _splitter((*present, True, present[2]))

    def arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return split(args)[:-1]

    def check(*args: Any) -> None:
        x, weight, bias, residual, out, residual_out, eps = arguments(args)
        _check_inputs(norm.name, x, weight, bias, residual, eps)
        for what, tensor in (("out", out), ("residual_out", residual_out)):
            if tensor is not None:
                _check_like_x(norm.name, what, tensor, x)
                check_contiguous(norm.name, what, tensor)

    def reference(*args: Any) -> None:
        x, weight, bias, residual, out, residual_out, eps = arguments(args)
        result = norm.reference(x, weight, bias, residual, eps=eps)
        if residual_out is None:
            out.copy_(result)
        else:
            out.copy_(result[0])
            residual_out.copy_(result[1])

    def why_not(*args: Any) -> Reason | None:
        x, weight, bias, residual, _, _, eps = arguments(args)
        return norm.why_not(x, weight, bias, residual, eps)

    count = 2 + sum(present) + present[2] + 2
    takes = arguments(tuple(map(Argument, range(count))))
    x, residual = takes[0], takes[3]
    run = launcher(
        norm.forward,
        takes,
        count=count,
        dense=(x,) if residual is None else (x, residual),
        otherwise=lambda *args: norm.into(*arguments(args)),
    )

    return Op(
        f"{norm.name}{_suffix(_OPTIONAL, present)}_out",
        f"({_signature(_OPTIONAL, present)}, Tensor(a!) out,"
        f"{' Tensor(b!) residual_out,' if present[2] else ''}"
        f" float eps={norm.eps}, str? backend=None) -> ()",
        check=check,
        fake=lambda *args: None,
        sm90=Backend("sm90", run, *_CUDA, why_not=why_not),
        ref=Backend("ref", reference, *_TORCH),
        family=norm.name,
    )


@dataclass(frozen=True)
class _Operators:
    name: str
    plain: dict[tuple[bool, ...], Op]
    out: dict[tuple[bool, ...], Op]
    usual: Op  # with a weight and nothing else
    usual_out: Op

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Any,
        eps: float,
        backend: str | None,
    ) -> Any:
        if weight is not None and bias is None and residual is None:
            if out is None:
                return self.usual.pick()(x, weight, eps, backend)
            self.usual_out.pick()(x, weight, out, eps, backend)
            return out
        given = (weight is not None, bias is not None, residual is not None)
        tensors = [tensor for tensor in (x, weight, bias, residual) if tensor is not None]
        if out is None:
            return self.plain[given](*tensors, eps, backend)
        outs = (out,)
        if residual is not None:
            if not isinstance(out, (tuple, list)) or len(out) != 2:
                got = f"{len(out)} values" if isinstance(out, (tuple, list)) else type(out).__name__
                raise TypeError(
                    f"{self.name}: with `residual`, `out` must be a pair (out, residual_out), "
                    f"got {got}"
                )
            outs = tuple(out)
        self.out[given](*tensors, *outs, eps, backend)
        return out if residual is None else outs


def operators(norm: _Launches) -> _Operators:
    # The one that has everything comes first: it is the public one.
    choices = list(product((True, False), repeat=3))
    backward = {key: _backward_operator(norm, key) for key in product((True, False), repeat=2)}
    plain = {choice: _operator(norm, choice, backward) for choice in choices}
    out = {choice: _out_operator(norm, choice) for choice in choices}
    usual = (True, False, False)
    return _Operators(norm.name, plain, out, plain[usual], out[usual])
