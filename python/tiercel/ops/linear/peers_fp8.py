# SPDX-License-Identifier: Apache-2.0
"""Float8 training: the weight's gradient, and a layer forward and backward."""

from __future__ import annotations

from typing import Any

from tiercel.ops.linear.cases_fp8 import forward_and_backward
from tiercel.workbench.bench.launch import Launch, Unsupported


def _weight_grad(case: Any, inputs: dict[str, Any]) -> Launch:
    """cuBLASLt's, rounded to bfloat16."""
    import torch
    from torch.nn import functional

    if case["result"] != "bfloat16":
        raise Unsupported("it is measured with bfloat16 results only")
    kind: Any = functional.ScalingType.BlockWise1x128
    grad, x, grad_scale, x_scale = inputs.values()
    arguments = (grad, x.t(), grad_scale.t(), kind, x_scale.t(), kind)
    return Launch(
        run=lambda: (functional.scaled_mm(*arguments, output_dtype=torch.bfloat16),),
    )


def _layer(case: Any, inputs: dict[str, Any]) -> Launch:
    """In bfloat16."""
    from torch.nn import functional

    return Launch(run=lambda: forward_and_backward(functional.linear, inputs))


ADAPTERS = {"torch": {"fp8_linear_training": _layer, "fp8_linear_weight_grad": _weight_grad}}
