# SPDX-License-Identifier: Apache-2.0
"""cross_entropy, alone and with its gradient."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from tiercel.ops.loss.cases import REDUCTION, loss_and_gradient, options_of
from tiercel.workbench.bench.compiled import compiled_for
from tiercel.workbench.bench.launch import Launch, Unsupported, WrongResult
from tiercel.workbench.bench.ops import Error

Inputs = dict[str, Any]


def cross_entropy(logits: Any, target: Any, label_smoothing: float, softcap: Any) -> Any:
    """The form that models have: float32 logits, for PyTorch rounds what it computes."""
    import torch
    from torch.nn import functional

    logits = logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return functional.cross_entropy(
        logits, target, reduction=REDUCTION, label_smoothing=label_smoothing
    )


def _torch(gradient: bool, compile_it: bool, case: Any, inputs: Inputs) -> Launch:
    function = compiled_for(case, cross_entropy) if compile_it else cross_entropy

    def loss(logits: Any) -> Any:
        return function(logits, inputs["target"], **options_of(case))

    if gradient:
        return Launch(lambda: loss_and_gradient(loss, inputs["logits"]))
    return Launch(lambda: (loss(inputs["logits"]),))


def _liger(case: Any, inputs: Inputs) -> Launch:
    """It overwrites the logits with the gradient, and asks the GPU how many rows count. The next
    calls take the gradient for logits, which takes as long."""
    import torch

    module: Any = importlib.import_module("liger_kernel.transformers.functional")
    logits, target = inputs["logits"].clone(), inputs["target"]

    def run() -> tuple[Any, Any]:
        return loss_and_gradient(
            lambda leaf: module.liger_cross_entropy(
                leaf, target, reduction=REDUCTION, **options_of(case)
            ),
            logits,
        )

    def check(outputs: tuple[Any, ...]) -> Error:
        """Whatever the logits: a row's gradient sums to nothing, and is negative at the target."""
        of_targets = outputs[1].gather(1, target[:, None])
        sums = torch.stack([part.float().sum(-1).abs().max() for part in outputs[1].split(1024)])
        if not (bool((of_targets < 0).all()) and float(sums.max()) < 0.1):
            raise WrongResult("that is no gradient")
        return Error(rms=0.0, maximum=0.0)

    def reset() -> None:
        logits.copy_(inputs["logits"])

    return Launch(run, graph=False, check=check, reset=reset)


def _quack(gradient: bool, case: Any, inputs: Inputs) -> Launch:
    if case["label_smoothing"] or case["softcap"]:
        raise Unsupported("it has neither smoothing nor a softcap")
    forward: Any = importlib.import_module("quack.cross_entropy").cross_entropy_fwd
    logits, target = inputs["logits"], inputs["target"]

    def run() -> tuple[Any, ...]:
        if not gradient:
            return (forward(logits, target).sum(),)
        loss, grad = forward(logits, target, return_dx=True)
        return loss.sum(), grad

    return Launch(run)


def _both(make: Callable[..., Any]) -> dict[str, Any]:
    names = {False: "cross_entropy", True: "cross_entropy_with_gradient"}
    return {name: partial(make, gradient) for gradient, name in names.items()}


ADAPTERS: dict[str, dict[str, Any]] = {
    "liger": {"cross_entropy_with_gradient": _liger},
    "quack": _both(_quack),
    "torch": _both(lambda gradient, *rest: _torch(gradient, False, *rest)),
    "torch.compile": _both(lambda gradient, *rest: _torch(gradient, True, *rest)),
}
