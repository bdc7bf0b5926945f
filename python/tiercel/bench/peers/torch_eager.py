# SPDX-License-Identifier: Apache-2.0
"""PyTorch, op by op."""

from __future__ import annotations

from typing import Any

from tiercel.bench.launch import Launch
from tiercel.bench.ops.linear import activate
from tiercel.bench.peers import Peer


def version() -> str:
    import torch

    return str(torch.__version__)


def topk_softmax(scores: Any, k: int, weights: str) -> tuple[Any, Any]:
    """The fewest kernels that give float32 weights for an exact selection."""
    import torch

    if weights == "all":
        indices = torch.topk(scores, k, dim=-1).indices
        probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32)
        return probabilities.gather(-1, indices), indices
    values, indices = torch.topk(scores, k, dim=-1)
    return torch.softmax(values, dim=-1, dtype=torch.float32), indices


def _topk_softmax(case: Any, inputs: dict[str, Any]) -> Launch:
    scores, k, weights = inputs["scores"], case["k"], case["weights"]
    return Launch(run=lambda: topk_softmax(scores, k, weights))


def linear_act(x: Any, weight: Any, bias: Any, activation: str) -> Any:
    import torch

    return activate(activation, torch.nn.functional.linear(x, weight, bias))


def _linear_act(case: Any, inputs: dict[str, Any]) -> Launch:
    arguments = (inputs["x"], inputs["weight"], inputs["bias"], case["act"])
    return Launch(run=lambda: (linear_act(*arguments),))


PEER = Peer("torch", version, {"topk_softmax": _topk_softmax, "linear_act": _linear_act})
