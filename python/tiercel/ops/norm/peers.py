# SPDX-License-Identifier: Apache-2.0
"""Normalisation over the last dimension, forward and backward."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from tiercel.ops.norm.cases import EPS, check_norm, reference
from tiercel.workbench.bench.compiled import compiled_for
from tiercel.workbench.bench.launch import Launch, Unsupported, WrongResult

Inputs = dict[str, Any]


def rms_norm(x: Any, weight: Any, bias: Any, residual: Any) -> tuple[Any, ...]:
    from torch.nn import functional

    total = x if residual is None else x + residual
    if weight is not None and weight.dtype != x.dtype:
        result = (functional.rms_norm(total.float(), x.shape[-1:], weight, EPS)).to(x.dtype)
    else:
        result = functional.rms_norm(total, x.shape[-1:], weight, EPS)
    if bias is not None:
        result = result + bias
    return (result,) if residual is None else (result, total)


def layer_norm(x: Any, weight: Any, bias: Any, residual: Any) -> tuple[Any, ...]:
    from torch.nn import functional

    total = x if residual is None else x + residual
    result = functional.layer_norm(total, x.shape[-1:], weight, bias, EPS)
    return (result,) if residual is None else (result, total)


_PLAIN = {"rms_norm": rms_norm, "layer_norm": layer_norm}


def _arguments(inputs: Inputs) -> tuple[Any, ...]:
    return tuple(inputs[name] for name in ("x", "weight", "bias", "residual"))


def _torch(op: str, case: Any, inputs: Inputs) -> Launch:
    if op == "layer_norm" and case["weight"] == "float32" and case.dtype != "float32":
        raise Unsupported("torch's layer_norm wants a weight of the input's dtype")
    function, arguments = _PLAIN[op], _arguments(inputs)
    return Launch(run=lambda: function(*arguments))


def _compiled(op: str, case: Any, inputs: Inputs) -> Launch:
    compiled, arguments = compiled_for(case, _PLAIN[op]), _arguments(inputs)
    return Launch(run=lambda: compiled(*arguments))


def _formula(layer: bool, with_bias: bool) -> Callable[..., tuple[Any, ...]]:
    """The gradients as autograd has them, for a compiler to fuse."""
    from tiercel.ops.norm.reference import norm_backward

    def gradients(x: Any, weight: Any, grad: Any, grad_residual: Any) -> tuple[Any, ...]:
        results = norm_backward(
            layer, x, weight, grad, grad_residual, weight is not None, with_bias, x.dtype, EPS
        )
        return tuple(result for result in results if result.numel())

    return gradients


def _backward_compiled(op: str, case: Any, inputs: Inputs) -> Launch:
    compiled = compiled_for(case, _formula(op == "layer_norm", case["bias"]))
    arguments = tuple(inputs[name] for name in ("x", "weight", "grad", "grad_residual"))
    return Launch(run=lambda: compiled(*arguments))


def _backward_torch(op: str, case: Any, inputs: Inputs) -> Launch:
    """The operations of torch.nn.functional's autograd, from the tensors that its forward saves."""
    import torch

    x, weight, bias, grad = (inputs[name] for name in ("x", "weight", "bias", "grad"))
    grad_residual = inputs["grad_residual"]
    shape, wanted = list(x.shape[-1:]), [True, weight is not None, bias is not None]
    aten = torch.ops.aten

    def given(grad_x: Any, *others: Any) -> tuple[Any, ...]:
        if grad_residual is not None:
            grad_x = grad_x + grad_residual
        return (grad_x, *(other for other in others if other is not None))

    if op == "layer_norm":
        _, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, EPS)

        def run() -> tuple[Any, ...]:
            grads = aten.native_layer_norm_backward(
                grad, x, shape, mean, rstd, weight, bias, wanted
            )
            return given(*grads)

        return Launch(run)
    if bias is not None:
        raise Unsupported("torch's rms_norm has no bias")
    _, rstd = aten._fused_rms_norm(x, shape, weight, EPS)

    def run_rms() -> tuple[Any, ...]:
        return given(*aten._fused_rms_norm_backward(grad, x, shape, rstd, weight, wanted[:2]))

    return Launch(run_rms)


def _quack(op: str, case: Any, inputs: Inputs) -> Launch:
    import torch

    module: Any = importlib.import_module("quack.rmsnorm")
    x, weight, bias, residual = _arguments(inputs)
    layer = op == "layer_norm"
    if layer and case.dtype != "float32":  # its layer norm takes float32 parameters only
        weight, bias = (None if t is None else t.float() for t in (weight, bias))
    out = torch.empty_like(x)
    total = None if residual is None else torch.empty_like(x)

    def run() -> tuple[Any, ...]:
        module._rmsnorm_fwd(x, weight, out, bias, None, None, residual, total, EPS, layer)
        return (out,) if total is None else (out, total)

    return Launch(run)


def _backward_quack(op: str, case: Any, inputs: Inputs) -> Launch:
    module: Any = importlib.import_module("quack.rmsnorm")
    grad_residual = inputs["grad_residual"]
    if op == "layer_norm":
        if grad_residual is not None:
            raise Unsupported("its layer norm adds nothing")
        _, rstd, mean = module.layernorm_fwd(
            inputs["x"],
            inputs["weight"].float(),
            None if inputs["bias"] is None else inputs["bias"].float(),
            EPS,
            return_rstd=True,
            return_mean=True,
        )
        weight = inputs["weight"].float()

        def run_layer() -> tuple[Any, ...]:
            grads = module.layernorm_bwd(
                inputs["x"], weight, inputs["grad"], rstd, mean, case["bias"]
            )
            return tuple(g for g in grads if g is not None)

        return Launch(run_layer)
    x, weight = inputs["x"], inputs["weight"]
    _, _, rstd = module.rmsnorm_fwd(x, weight, eps=EPS, store_rstd=True)
    with_bias = case["bias"]

    def run() -> tuple[Any, ...]:
        grads = module.rmsnorm_bwd(x, weight, inputs["grad"], rstd, grad_residual, with_bias)
        return tuple(g for g in grads[:3] if g is not None)

    return Launch(run)


def _liger_module(op: str, inputs: Inputs) -> Any:
    if inputs["weight"] is None:
        raise Unsupported("it wants a weight")
    if op == "layer_norm" and inputs["bias"] is None:
        raise Unsupported("its layer norm wants a bias")
    if op == "rms_norm" and inputs["bias"] is not None:
        raise Unsupported("its RMS norm has no bias")
    return importlib.import_module(f"liger_kernel.ops.{op}")


def _liger(op: str, case: Any, inputs: Inputs) -> Launch:
    module = _liger_module(op, inputs)
    x, weight, bias, residual = _arguments(inputs)
    if op == "layer_norm":
        if residual is not None:
            raise Unsupported("its layer norm adds nothing")
        return Launch(run=lambda: (module.layer_norm_forward(x, weight, bias, EPS)[0],))
    if residual is None:
        run: Callable[[], Any] = lambda: (  # noqa: E731
            module.rms_norm_forward(x, weight, EPS, 0.0, "llama", None)[0],
        )
        return Launch(run)
    fused: Any = importlib.import_module("liger_kernel.ops.fused_add_rms_norm")

    def add() -> tuple[Any, ...]:
        results = fused.fused_add_rms_norm_forward(x, residual, weight, EPS, 0.0, "llama")
        return results[0], results[1]

    return Launch(add)


def _backward_liger(op: str, case: Any, inputs: Inputs) -> Launch:
    module = _liger_module(op, inputs)
    x, weight, bias, grad = (inputs[name] for name in ("x", "weight", "bias", "grad"))
    grad_residual = inputs["grad_residual"]
    if op == "layer_norm":
        if grad_residual is not None:
            raise Unsupported("its layer norm adds nothing")
        _, rows, mean, rstd, _, _ = module.layer_norm_forward(x, weight, bias, EPS)
        return Launch(
            run=lambda: tuple(module.layer_norm_backward(grad, rows, weight, bias, mean, rstd))
        )
    if grad_residual is not None:
        fused: Any = importlib.import_module("liger_kernel.ops.fused_add_rms_norm")
        nothing = x.new_zeros(()).expand_as(x).contiguous()
        _, total, rstd, block, warps, stages, mode = fused.fused_add_rms_norm_forward(
            x, nothing, weight, EPS, 0.0, "llama"
        )

        def add() -> tuple[Any, ...]:
            grad_x, _, grad_weight = fused.fused_add_rms_norm_backward(
                grad, grad_residual, total, weight, rstd, 0.0, mode, block, warps, stages, False
            )
            return grad_x, grad_weight

        return Launch(add)
    _, rows, rstd, block, warps, mode = module.rms_norm_forward(x, weight, EPS, 0.0, "llama", None)

    def run() -> tuple[Any, ...]:
        return tuple(
            module.rms_norm_backward(grad, rows, weight, rstd, 0.0, mode, block, warps, False, None)
        )

    return Launch(run)


def _vllm(case: Any, inputs: Inputs) -> Launch:
    """Its fused form works in place: the sum goes to `residual`, the result to `x`."""
    import torch

    x, weight, bias, residual = _arguments(inputs)
    if bias is not None or weight is None:
        raise Unsupported("it takes a weight and no bias")
    if weight.dtype != x.dtype:
        raise Unsupported("it wants a weight of the input's dtype")
    operators = torch.ops._C
    if residual is None:
        out = torch.empty_like(x)
        function: Any = operators.rms_norm

        def run() -> tuple[Any, ...]:
            function(out, x, weight, EPS)
            return (out,)

        return Launch(run)
    # The next calls normalise their own results, which takes as long.
    normal, total = x.clone(), residual.clone()
    fused: Any = operators.fused_add_rms_norm

    def add() -> tuple[Any, ...]:
        fused(normal, total, weight, EPS)
        return normal, total

    def reset() -> None:
        normal.copy_(x)
        total.copy_(residual)

    def check(outputs: tuple[Any, ...]) -> Any:
        if torch.equal(outputs[1], residual):
            raise WrongResult("nothing was added")
        given = {"x": outputs[1], "weight": weight, "bias": None, "residual": None}
        return check_norm(given, reference(False, case, given), outputs[:1], Launch(add))

    return Launch(add, check=check, reset=reset)


def _both(function: Callable[..., Launch], suffix: str = "") -> dict[str, Callable[..., Launch]]:
    return {f"{op}{suffix}": partial(function, op) for op in _PLAIN}


ADAPTERS = {
    "liger": _both(_liger) | _both(_backward_liger, "_backward"),
    "quack": _both(_quack) | _both(_backward_quack, "_backward"),
    "torch": _both(_torch) | _both(_backward_torch, "_backward"),
    "torch.compile": _both(_compiled) | _both(_backward_compiled, "_backward"),
    "vllm": {"rms_norm": _vllm},
}
