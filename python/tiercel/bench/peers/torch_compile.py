# SPDX-License-Identifier: Apache-2.0
"""torch.compile of the same PyTorch code, for fixed shapes."""

from __future__ import annotations

from typing import Any

from tiercel.bench.launch import Launch
from tiercel.bench.peers import Peer, torch_eager


def _topk_softmax(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    torch._dynamo.reset()  # every case is a new shape: without this the compile limit is soon met
    compiled = torch.compile(torch_eager.topk_softmax, dynamic=False, fullgraph=True)
    scores, k, weights = inputs["scores"], case["k"], case["weights"]
    return Launch(run=lambda: compiled(scores, k, weights))


PEER = Peer("torch.compile", torch_eager.version, {"topk_softmax": _topk_softmax}, on_request=True)
