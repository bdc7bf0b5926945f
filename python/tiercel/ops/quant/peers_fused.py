# SPDX-License-Identifier: Apache-2.0
"""Norms and gated activations with 8-bit results: in PyTorch, and in vLLM's operators."""

from __future__ import annotations

from typing import Any

from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.peers.vllm import operator

Inputs = dict[str, Any]


def _torch(op: str, compiled: bool) -> Any:
    def prepare(case: Any, inputs: Inputs) -> Launch:
        from tiercel.ops.quant import reference

        return _launch(compiled, case, getattr(reference, op), inputs)

    return prepare


_OPS = ("act_and_mul_quant", "layer_norm_quant", "rms_norm_quant")


def _launch(compiled: bool, case: Any, function: Any, inputs: Inputs) -> Launch:
    import torch

    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, dynamic=False, fullgraph=True)
    return Launch(lambda: function(**inputs, granularity=case["scales"]))


def _norm_vllm(case: Any, inputs: Inputs) -> Launch:
    x, q, scale, weight, residual = inputs.values()
    if case["scales"] == "row":
        function = operator("_C", "rms_norm_dynamic_per_token_quant")
        arguments = (q, x, weight, scale, 1e-6, None, residual)
    elif case["scales"] == "tensor":
        given = scale.view(1)
        if residual is None:
            function = operator("_C", "rms_norm_static_fp8_quant")
            arguments = (q, x, weight, given, 1e-6)
        else:
            function = operator("_C", "fused_add_rms_norm_static_fp8_quant")
            arguments = (q, x, residual, weight, given, 1e-6)
    else:
        function = operator("_C", "rms_norm_per_block_quant")
        arguments = (q, x, weight, scale, 1e-6, None, residual, 128, False)
    if len(arguments) > len(function.default._schema.arguments):
        raise Unsupported("its operator takes other arguments")

    def run() -> tuple[Any, Any]:
        function(*arguments)
        return q, scale

    return Launch(run)


def _activation_vllm(case: Any, inputs: Inputs) -> Launch:
    x, q, scale = inputs.values()
    if case["scales"] == "tensor":
        function, arguments = operator("_C", "silu_and_mul_quant"), (q, x, scale.view(1))
    elif case["scales"] == "1x128":
        function = operator("_C", "silu_and_mul_per_block_quant")
        arguments = (q, x, scale, 128)
    else:
        raise Unsupported("it has no scale for each row")

    def run() -> tuple[Any, Any]:
        function(*arguments)
        return q, scale

    return Launch(run)


ADAPTERS = {
    "torch": {op: _torch(op, False) for op in _OPS},
    "torch.compile": {op: _torch(op, True) for op in _OPS},
    "vllm": {"act_and_mul_quant": _activation_vllm, "rms_norm_quant": _norm_vllm},
}
