# SPDX-License-Identifier: Apache-2.0
"""The gradients of gated_delta_rule in flash-linear-attention: its forward once, its backward
timed."""

from __future__ import annotations

import importlib
from typing import Any

from tiercel.workbench.bench.launch import Launch


def _fla(case: Any, inputs: dict[str, Any]) -> Launch:
    """Through autograd, whose host time long backwards hide. The first calls compile and tune."""
    import torch

    if case["gate"] == "channel":
        function = importlib.import_module("fla.ops.kda").chunk_kda
    else:
        function = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    *given, grad = inputs.values()
    tensors = [t.detach().requires_grad_() for t in given]
    out = function(*tensors, use_qk_l2norm_in_kernel=True)[0]

    def run() -> tuple[Any, ...]:
        return torch.autograd.grad(out, tensors, grad, retain_graph=True)

    run()
    return Launch(run, graph=False)


ADAPTERS = {"fla": {"gated_delta_rule_backward": _fla}}
