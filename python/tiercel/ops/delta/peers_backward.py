# SPDX-License-Identifier: Apache-2.0
"""The gradients of gated_delta_rule in other libraries: one forward, then backwards, timed."""

from __future__ import annotations

from typing import Any

from tiercel.ops.delta.peers import fla, flashqla
from tiercel.workbench.bench.launch import Launch


def _gradients(find: Any) -> Any:
    """Through autograd, whose host time long backwards hide. The first calls compile and tune."""

    def adapter(case: Any, inputs: dict[str, Any]) -> Launch:
        import torch

        function = find(case)
        *given, grad = inputs.values()
        tensors = [t.detach().requires_grad_() for t in given]
        out = function(*tensors, use_qk_l2norm_in_kernel=True)[0]

        def run() -> tuple[Any, ...]:
            return torch.autograd.grad(out, tensors, grad, retain_graph=True)

        run()
        return Launch(run, graph=False)

    return adapter


ADAPTERS = {
    "fla": {"gated_delta_rule_backward": _gradients(fla)},
    "flashqla": {"gated_delta_rule_backward": _gradients(flashqla)},
}
