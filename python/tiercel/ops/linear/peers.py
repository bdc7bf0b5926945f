# SPDX-License-Identifier: Apache-2.0
"""Linear layers with their activation."""

from __future__ import annotations

import importlib
from typing import Any

from tiercel.ops.linear.cases import activate, empty_output
from tiercel.workbench.bench.compiled import compiled_for
from tiercel.workbench.bench.launch import Launch, Unsupported


def linear_act(x: Any, weight: Any, bias: Any, residual: Any, activation: str) -> Any:
    import torch

    result = activate(activation, torch.nn.functional.linear(x, weight, bias))
    return result if residual is None else result + residual


def _arguments(case: Any, inputs: dict[str, Any]) -> tuple[Any, ...]:
    return *(inputs[name] for name in ("x", "weight", "bias", "residual")), case["act"]


def _torch(case: Any, inputs: dict[str, Any]) -> Launch:
    arguments = _arguments(case, inputs)
    return Launch(run=lambda: (linear_act(*arguments),))


def _compiled(case: Any, inputs: dict[str, Any]) -> Launch:
    # Its own matrix products too.
    compiled = compiled_for(case, linear_act, mode="max-autotune-no-cudagraphs")
    arguments = _arguments(case, inputs)
    return Launch(run=lambda: (compiled(*arguments),))


def _cublaslt(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    if case["act"] not in ("relu", "gelu_tanh") or not case["bias"] or case["residual"]:
        raise Unsupported("torch offers relu and gelu_tanh, with a bias and without a residual")
    function: Any = torch._addmm_activation
    arguments = (inputs["bias"], inputs["x"], inputs["weight"].t())
    gelu = case["act"] == "gelu_tanh"
    out = empty_output(case, inputs)

    def run() -> tuple[Any, ...]:
        function(*arguments, use_gelu=gelu, out=out)
        return (out,)

    return Launch(run, host=lambda: function(*arguments, use_gelu=gelu))


_QUACK_ACTIVATIONS = {"none": None, "gelu": "gelu_erf", "gelu_tanh": "gelu_tanh_approx"}


def _quack(case: Any, inputs: dict[str, Any], tuned: bool = False) -> Launch:
    """`tuned` searches its configurations; otherwise it has one for all sizes."""
    if case["residual"]:
        raise Unsupported("it adds no residual after the activation")
    gemm_act: Any = importlib.import_module("quack.gemm_interface").gemm_act
    x, weight, out = inputs["x"], inputs["weight"], empty_output(case, inputs)
    options: dict[str, Any] = {"bias": inputs["bias"], "store_preact": False, "tuned": tuned}
    options["activation"] = _QUACK_ACTIVATIONS.get(case["act"], case["act"])

    def run() -> tuple[Any, ...]:
        gemm_act(x, weight.t(), postact_out=out, **options)
        return (out,)

    return Launch(run, host=lambda: gemm_act(x, weight.t(), **options))


def _quack_tuned(case: Any, inputs: dict[str, Any]) -> Launch:
    return _quack(case, inputs, tuned=True)


ADAPTERS = {
    "cublaslt": {"linear_act": _cublaslt},
    "quack": {"linear_act": _quack},
    "quack.tuned": {"linear_act": _quack_tuned},
    "torch": {"linear_act": _torch},
    "torch.compile": {"linear_act": _compiled},
}
