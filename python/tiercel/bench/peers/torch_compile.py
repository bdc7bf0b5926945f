# SPDX-License-Identifier: Apache-2.0
"""torch.compile of the same PyTorch code, for fixed shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiercel.bench.launch import Launch
from tiercel.bench.peers import Peer, torch_eager


def _topk_softmax(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    torch._dynamo.reset()  # every case is a new shape: without this the compile limit is soon met
    compiled = torch.compile(torch_eager.topk_softmax, dynamic=False, fullgraph=True)
    scores, k, weights = inputs["scores"], case["k"], case["weights"]
    return Launch(run=lambda: compiled(scores, k, weights))


_last: dict[Any, Callable[..., Any]] = {}  # one compilation for all inputs of a case


def _linear_act(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    if case.key not in _last:
        torch._dynamo.reset()
        _last.clear()
        _last[case.key] = torch.compile(
            torch_eager.linear_act,
            dynamic=False,
            fullgraph=True,
            mode="max-autotune-no-cudagraphs",  # its own matrix products too
        )
    compiled = _last[case.key]
    arguments = (inputs["x"], inputs["weight"], inputs["bias"], case["act"])
    return Launch(run=lambda: (compiled(*arguments),))


_OPS = {"topk_softmax": _topk_softmax, "linear_act": _linear_act}
PEER = Peer("torch.compile", torch_eager.version, _OPS, on_request=True)
