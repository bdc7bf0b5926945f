# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy, alone and with its gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from tiercel.ops.loss.cases_linear import step
from tiercel.workbench.bench.compiled import compiled_for
from tiercel.workbench.bench.launch import Launch

Inputs = dict[str, Any]


def linear_cross_entropy(x: Any, weight: Any, target: Any) -> Any:
    """The form that models have: all logits, the loss of them in float32."""
    from torch.nn import functional

    return functional.cross_entropy(functional.linear(x, weight).float(), target)


def _launch(gradient: bool, loss: Callable[..., Any], inputs: Inputs) -> Launch:
    if gradient:
        return Launch(lambda: step(loss, inputs))
    return Launch(lambda: (loss(*inputs.values()),))


def _torch(gradient: bool, compile_it: bool, case: Any, inputs: Inputs) -> Launch:
    loss = compiled_for(case, linear_cross_entropy) if compile_it else linear_cross_entropy
    return _launch(gradient, loss, inputs)


def _liger(case: Any, inputs: Inputs) -> Launch:
    """It asks the GPU how many rows count."""
    module: Any = importlib.import_module("liger_kernel.transformers.functional")

    def loss(x: Any, weight: Any, target: Any) -> Any:
        return module.liger_fused_linear_cross_entropy(x, weight, target)

    return Launch(lambda: step(loss, inputs), graph=False)


def _quack(case: Any, inputs: Inputs) -> Launch:
    module: Any = importlib.import_module("quack.linear_cross_entropy")

    def loss(x: Any, weight: Any, target: Any) -> Any:
        return module.chunked_linear_cross_entropy(x, weight, target, reduction="mean")

    return Launch(lambda: step(loss, inputs))


def _both(make: Callable[..., Any]) -> dict[str, Any]:
    names = {False: "linear_cross_entropy", True: "linear_cross_entropy_with_gradient"}
    return {name: partial(make, gradient) for gradient, name in names.items()}


ADAPTERS: dict[str, dict[str, Any]] = {
    "liger": {"linear_cross_entropy_with_gradient": _liger},
    "quack": {"linear_cross_entropy_with_gradient": _quack},
    "torch": _both(lambda gradient, *rest: _torch(gradient, False, *rest)),
    "torch.compile": _both(lambda gradient, *rest: _torch(gradient, True, *rest)),
}
