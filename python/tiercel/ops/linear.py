# SPDX-License-Identifier: Apache-2.0
"""Linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C, _platform
from tiercel._checks import check_contiguous, check_dtype, check_same_device, check_shape
from tiercel._eager import empty
from tiercel._launcher import Argument, Choice, Like, Output, launcher
from tiercel._op import Autograd, Backend, Op
from tiercel._platform import Reason
from tiercel.ref import linear as ref

__all__ = ["linear_act"]

_NAME = "linear_act"
_DTYPES = (torch.bfloat16, torch.float16)
# Precompiled, as Activation in linear_act.h counts; the reference's others are compiled where they
# are used, if TIERCEL_JIT=1 allows that.
_INDEX = {"none": 0, "relu": 1, "silu": 2, "gelu": 3, "gelu_tanh": 4}


def check_activation(activation: str) -> None:
    if activation not in ref.ACTIVATIONS:
        known = ", ".join(ref.ACTIVATIONS)
        raise ValueError(f"{_NAME}: `activation` must be one of {known}, got {activation!r}")


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, act: str) -> None:
    check_dtype(_NAME, "x", x.dtype, _DTYPES)
    check_dtype(_NAME, "weight", weight.dtype, (x.dtype,))
    if x.dim() < 1:
        raise ValueError(f"{_NAME}: `x` must have at least 1 dimension, got 0")
    features = x.shape[-1]
    rows = weight.shape[0] if weight.dim() else 0
    check_shape(_NAME, "weight", weight, (rows, features), "[N, K]")
    check_same_device(_NAME, "weight", weight, "x", x)
    if bias is not None:
        check_dtype(_NAME, "bias", bias.dtype, (x.dtype,))
        check_shape(_NAME, "bias", bias, (rows,), "[N]")
        check_same_device(_NAME, "bias", bias, "x", x)
    if out is not None:
        check_dtype(_NAME, "out", out.dtype, (x.dtype,))
        check_shape(_NAME, "out", out, (*x.shape[:-1], rows), "[..., N]")
        check_same_device(_NAME, "out", out, "x", x)
        check_contiguous(_NAME, "out", out)
    check_activation(act)


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _output(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype, device=x.device)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    activation: str,
    *,
    launch: Any = _C.linear_act,
) -> None:
    index = _INDEX.get(activation)
    if index is None:
        _launch_compiled(_rows(x), weight, bias, _rows(out), activation)
    elif x.dim() == 2:
        launch(x, weight, bias, out, index)
    else:
        launch(_rows(x), weight, bias, _rows(out), index)


def _launch_compiled(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, activation: str
) -> None:
    """An activation that is not precompiled, with the tiles that another one would have."""
    from tiercel.jit.cute_kernel import variant, why_not

    check_activation(activation)
    missing = why_not()
    if missing is not None:
        raise NotImplementedError(f"{_NAME}: `activation` {activation!r}: {missing}")
    plan = _C.linear_act_plan(x, weight, bias, out, 0)
    if plan["kernel"] == "none":
        return
    kernel = variant(
        "linear",
        "linear_cute",
        dtype="bf16" if x.dtype == torch.bfloat16 else "fp16",
        act=activation,
        tile_m=plan["tile_m"],
        tile_n=plan["tile_n"],
        pingpong=plan["pingpong"],
        split_k=plan["rows"] > 0,
    )
    kernel(
        # A split-K kernel loads only the rows of its tile.
        boxes={"x": (plan["rows"], 64)} if plan["rows"] else None,
        x=x,
        w=weight,
        y=out,
        bias=bias,
        m=x.shape[0],
        n=weight.shape[0],
        k=x.shape[1],
        group=plan["group"],
        rows=plan["rows"],
        splits=plan["splits"],
        blocks=plan["grid"],
    )


# The fast paths: kept flat, each line costs host time.
def _sm90(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, _: Any) -> Tensor:
    out: Tensor = empty(x, (*x.shape[:-1], weight.shape[0]), x.dtype)
    _launch(x, weight, bias, out, activation)
    return out


def _sm90_no_bias(x: Tensor, weight: Tensor, activation: str, _: Any) -> Tensor:
    return _sm90(x, weight, None, activation, None)


def _plan(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> dict[str, Any]:
    rows = _rows(x)
    out = torch.empty(rows.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    index = _INDEX.get(activation)
    plan = dict(_C.linear_act_plan(rows, weight, bias, out, index or 0))
    return plan if index is not None else plan | {"kernel": "compiled here (TIERCEL_JIT)"}


def _why_not(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Reason | None:
    reason = _platform.why_not(x.device)
    if reason is not None:
        return reason
    if activation not in _INDEX:
        from tiercel.jit.cute_kernel import why_not

        missing = why_not()
        if missing is not None:
            text = f"`activation` {activation!r}: {missing}"
            return Reason(NotImplementedError, text)
    try:
        _plan(_rows(x)[:2], weight, bias, activation)  # two rows show the stride
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).removeprefix(f"{_NAME}: "))
    return None


def _save(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> None:
    ctx.activation = activation
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if grad is None:
        return None, None, None
    x, weight, bias = ctx.saved_tensors
    if ctx.activation != "none":
        # The sums are not kept: computing them again costs less memory than a third of the batch.
        with torch.enable_grad():
            sums = torch.nn.functional.linear(x, weight, bias).detach().requires_grad_()
            result = ref.ACTIVATIONS[ctx.activation](sums)
        (grad,) = torch.autograd.grad(result, sums, grad)
    rows = _rows(grad)
    wants = ctx.needs_input_grad[1:]  # after the flag that says how to run
    grad_x = (grad @ weight) if wants[0] else None
    grad_weight = (rows.t() @ _rows(x)) if wants[1] else None
    grad_bias = rows.sum(0) if bias is not None and wants[2] else None
    return grad_x, grad_weight, grad_bias


_CUTE = ("TMA and wgmma with a fused epilogue; split K within a cluster for few rows", "cute")
_TORCH = ("torch.nn.functional.linear and the activation", "torch")


# The schema's tensors come first and none is optional, so that all of them are looked at: there is
# an operator with a bias and one without.
def _operator(with_bias: bool) -> Op:
    def split(args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor | None, str]:
        x, weight, *rest = args
        return x, weight, rest[0] if with_bias else None, rest[-2]

    def check(*args: Any) -> None:
        x, weight, bias, activation = split(args)
        _check(x, weight, bias, None, activation)

    def reference(*args: Any) -> Tensor:
        x, weight, bias, activation = split(args)
        return ref.linear_act(x, weight, bias, activation=activation).contiguous()

    def save(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
        _save(ctx, *split(args))

    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, grad)[: 3 if with_bias else 2]

    count = 5 if with_bias else 4
    x, weight, bias, activation = split(tuple(map(Argument, range(count))))
    run = launcher(
        _C.linear_act,
        (x, weight, bias, Output(0), Choice(activation, _INDEX)),
        count=count,
        outputs=(Like(x, rank=2, dims=((x, 0), (weight, 0))),),
        otherwise=_sm90 if with_bias else _sm90_no_bias,
    )

    return Op(
        _NAME if with_bias else f"{_NAME}_no_bias",
        f"(Tensor x, Tensor weight, {'Tensor bias, ' if with_bias else ''}"
        "str activation='gelu', str? backend=None) -> Tensor",
        check=check,
        fake=lambda *args: _output(*args[:2]),
        sm90=Backend(
            "sm90",
            run,
            *_CUTE,
            why_not=lambda *args: _why_not(*split(args)),
        ),
        ref=Backend("ref", reference, *_TORCH),
        autograd=Autograd(save, backward),
        family=_NAME,
        describe=lambda *args: _plan(*split(args)),
        load=_C.linear_act_load if with_bias else None,
    )


def _out_operator(with_bias: bool) -> Op:
    def split(args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor | None, Tensor, str]:
        x, weight, *rest = args
        return x, weight, rest[0] if with_bias else None, rest[-3], rest[-2]

    def reference(*args: Any) -> None:
        x, weight, bias, out, activation = split(args)
        out.copy_(ref.linear_act(x, weight, bias, activation=activation))

    def why_not(*args: Any) -> Reason | None:
        x, weight, bias, _, activation = split(args)
        return _why_not(x, weight, bias, activation)

    return Op(
        f"{_NAME}_out" if with_bias else f"{_NAME}_no_bias_out",
        f"(Tensor x, Tensor weight, {'Tensor bias, ' if with_bias else ''}Tensor(a!) out, "
        "str activation='gelu', str? backend=None) -> ()",
        check=lambda *args: _check(*split(args)),
        fake=lambda *args: None,
        sm90=Backend("sm90", lambda *args: _launch(*split(args)), *_CUTE, why_not=why_not),
        ref=Backend("ref", reference, *_TORCH),
        family=_NAME,
    )


_LINEAR_ACT = _operator(True)
_LINEAR_ACT_NO_BIAS = _operator(False)
_LINEAR_ACT_OUT = _out_operator(True)
_LINEAR_ACT_NO_BIAS_OUT = _out_operator(False)


@_LINEAR_ACT.export
def linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "gelu",
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """A linear layer with its activation in one kernel: ``act(x @ weight.T + bias)``.

    Sums, bias and activation are float32, and the result is rounded once; torch's own two steps
    round in between.

    Differentiable in ``x``, ``weight`` and ``bias``: the backward computes the sums again and is
    torch's. Works under torch.compile and torch.export, and in CUDA graphs; it never synchronises.

    Args:
        x: ``[..., K]``, bfloat16 or float16. The precompiled kernels take rows at any distance
            that is a multiple of 16 bytes, and K and N that are multiples of 8; ref takes others.
        weight: ``[N, K]``, the dtype and device of ``x``.
        bias: ``[N]``, or None.
        activation: ``"none"``, ``"relu"``, ``"silu"``, ``"gelu"`` (by the error function),
            ``"gelu_tanh"`` or ``"relu_squared"``; the last one is not precompiled (TIERCEL_JIT).
        out: ``[..., N]`` to write to, contiguous, of the dtype and on the device of ``x``. Then no
            gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``[..., N]``, the dtype of ``x``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such activation or
            backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> hidden = tiercel.linear_act(x, up.weight, up.bias, activation="gelu")
    """
    if out is None:
        result: Tensor = (
            _LINEAR_ACT_NO_BIAS.pick()(x, weight, activation, backend)
            if bias is None
            else _LINEAR_ACT.pick()(x, weight, bias, activation, backend)
        )
        return result
    if bias is None:
        _LINEAR_ACT_NO_BIAS_OUT(x, weight, out, activation, backend)
    else:
        _LINEAR_ACT_OUT(x, weight, bias, out, activation, backend)
    return out
