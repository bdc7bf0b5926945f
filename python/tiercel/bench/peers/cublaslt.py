# SPDX-License-Identifier: Apache-2.0
"""cuBLASLt's fused epilogues, by the operator of PyTorch that calls them."""

from __future__ import annotations

from typing import Any

from tiercel.bench.launch import Launch, Unsupported
from tiercel.bench.ops.linear import empty_output
from tiercel.bench.peers import Missing, Peer


def _find() -> str:
    import torch

    if not hasattr(torch, "_addmm_activation"):
        raise Missing(f"torch {torch.__version__} has no _addmm_activation")
    return f"of torch {torch.__version__}"


def _linear_act(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    if case["act"] not in ("relu", "gelu_tanh") or not case["bias"]:
        raise Unsupported("torch offers relu and gelu_tanh, with a bias")
    function: Any = torch._addmm_activation
    arguments = (inputs["bias"], inputs["x"], inputs["weight"].t())
    gelu = case["act"] == "gelu_tanh"
    out = empty_output(case, inputs)

    def run() -> tuple[Any, ...]:
        function(*arguments, use_gelu=gelu, out=out)
        return (out,)

    return Launch(run, host=lambda: function(*arguments, use_gelu=gelu))


PEER = Peer("cublaslt", _find, {"linear_act": _linear_act})
