# SPDX-License-Identifier: Apache-2.0
"""Activations, plain and gated, forward and backward."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from tiercel.ops.activation.cases import OPS, empty_output, options
from tiercel.workbench.bench.compiled import compiled_for
from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.peers import vllm

Inputs = dict[str, Any]


def _function(op: str, case: Any) -> Callable[[Any], Any]:
    from torch.nn import functional

    found = getattr(functional, op.removesuffix("_and_mul"))
    return partial(found, **options(case))


def forward(function: Callable[[Any], Any], gated: bool, x: Any, up: Any, scale: Any) -> Any:
    """The form that models have: the activation's result is rounded before the product."""
    import torch

    gate, factor = x.chunk(2, dim=-1) if gated and up is None else (x, up)
    result = function(gate)
    if gated:
        result = result * factor
    if scale is None:
        return result
    return (result.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def _gradient_of(op: str, case: Any) -> Callable[[Any, Any], Any]:
    """(grad, x) -> the activation's own gradient, as autograd calls it."""
    import torch

    name = op.removesuffix("_and_mul")
    if name == "silu":
        return lambda grad, x: torch.ops.aten.silu_backward(grad, x)
    if name == "relu":
        return lambda grad, x: torch.ops.aten.threshold_backward(grad, x, 0)
    return lambda grad, x: torch.ops.aten.gelu_backward(grad, x, **options(case))


def _by_hand(op: str, case: Any, gated: bool) -> Callable[..., tuple[Any, ...]]:
    """The gradient without autograd, for graphs and compilers."""
    import torch

    function, gradient = _function(op, case), _gradient_of(op, case)

    def run(grad: Any, x: Any, up: Any) -> tuple[Any, ...]:
        if not gated:
            return (gradient(grad, x),)
        gate, factor = x.chunk(2, dim=-1) if up is None else (x, up)
        results = gradient(grad * factor, gate), grad * function(gate)
        return (torch.cat(results, dim=-1),) if up is None else results

    return run


def _torch(op: str, is_backward: bool, compiled: bool, case: Any, inputs: Inputs) -> Launch:
    gated = op.endswith("_and_mul")
    x, up = inputs["x"], inputs["up"]
    if is_backward:
        gradients = _by_hand(op, case, gated)
        run = compiled_for(case, gradients) if compiled else gradients
        return Launch(lambda: run(inputs["grad"], x, up))
    plain = partial(forward, _function(op, case), gated)
    call = compiled_for(case, plain) if compiled else plain
    return Launch(lambda: (call(x, up, inputs["scale"]),))


def _liger(op: str, is_backward: bool, case: Any, inputs: Inputs) -> Launch:
    x, up, grad = inputs["x"], inputs["up"], inputs["grad"]
    if inputs["scale"] is not None:
        raise Unsupported("no float8 result")
    if op == "silu_and_mul":
        module: Any = importlib.import_module("liger_kernel.ops.swiglu")
        if up is None:
            if not hasattr(module, "swiglu_fused_gate_up_forward"):
                raise Unsupported("this liger takes no packed form")
            if is_backward:
                return Launch(lambda: (module.swiglu_fused_gate_up_backward(x, grad),))
            return Launch(lambda: (_last_of(module.swiglu_fused_gate_up_forward(x)),))
        function = module.swiglu_forward
    elif case["approximate"] != "tanh" or up is None:
        raise Unsupported("liger has the pair form of the tanh approximation")
    else:
        function = importlib.import_module("liger_kernel.ops.geglu").geglu_forward
    if is_backward:
        raise Unsupported("liger writes the gradients over the inputs")
    return Launch(lambda: (_last_of(function(x, up)),))


def _last_of(result: Any) -> Any:
    return result[-1] if isinstance(result, tuple) else result


def _vllm(op: str, case: Any, inputs: Inputs) -> Launch:
    if inputs["up"] is not None:
        raise Unsupported("vllm takes the packed form")
    out = empty_output(case, inputs)
    tanh = case.params.get("approximate") == "tanh"
    x, scale = inputs["x"], inputs["scale"]
    if scale is not None:
        if op != "silu_and_mul":
            raise Unsupported("vllm has a float8 result of silu alone")
        quantized = vllm.operator("_C", "silu_and_mul_quant")

        def run_quantized() -> tuple[Any, ...]:
            quantized(out, x, scale)
            return (out,)

        return Launch(run_quantized)
    function = vllm.operator("_C", "gelu_tanh_and_mul" if tanh else op)

    def run() -> tuple[Any, ...]:
        function(out, x)
        return (out,)

    return Launch(run)


def _all(make: Callable[..., Any], ops: tuple[str, ...] = OPS) -> dict[str, Any]:
    return {f"{op}{'_backward' * back}": partial(make, op, back) for op in ops for back in (0, 1)}


ADAPTERS: dict[str, dict[str, Any]] = {
    "liger": _all(_liger, ("silu_and_mul", "gelu_and_mul")),
    "torch": _all(lambda op, back, case, inputs: _torch(op, bool(back), False, case, inputs)),
    "torch.compile": _all(
        lambda op, back, case, inputs: _torch(op, bool(back), True, case, inputs)
    ),
    "vllm": {op: partial(_vllm, op) for op in ("silu_and_mul", "gelu_and_mul")},
}
