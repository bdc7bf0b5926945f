# SPDX-License-Identifier: Apache-2.0
"""cross_entropy: the loss alone, and the loss with its gradient, through autograd."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
# A sum: the gradient of each row then is as its own loss has it, also in libraries without means.
REDUCTION = "sum"


def _invalid(params: Mapping[str, Any]) -> str | None:
    if not all(isinstance(params[name], int) and params[name] > 0 for name in "TV"):
        return "T and V must be positive whole numbers"
    if not (params["softcap"] is False or params["softcap"] > 0):
        return "softcap must be a positive number, or false for none"
    return None


def options_of(case: Any) -> dict[str, Any]:
    smoothing = float(case["label_smoothing"])
    return {"label_smoothing": smoothing, "softcap": case["softcap"] or None}


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    shape, dtype = (case["T"], case["V"]), getattr(torch, case.dtype)
    logits = torch.empty(shape, device=device, dtype=dtype)
    for part in logits.split(1024):  # float32 numbers would be the largest thing in memory
        part.copy_(3 * torch.randn(part.shape, device=device, generator=generator))
    target = torch.randint(case["V"], (case["T"],), device=device, generator=generator)
    return {"logits": logits, "target": target}


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (inputs["logits"], inputs["target"]), {"reduction": REDUCTION, **options_of(case)}


def _bytes(gradient: bool, case: Any) -> int:
    element = _ELEMENT[case.dtype]
    return int(case["T"] * (case["V"] * element * (1 + gradient) + 12))


def loss_and_gradient(function: Any, logits: Any) -> tuple[Any, Any]:
    """Runs forward and backward of `function`, which returns the loss, as a training step does."""
    import torch

    leaf = logits.detach().requires_grad_()
    loss = function(leaf)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad


def _reference(gradient: bool, case: Any, inputs: Inputs) -> Any:
    import torch

    from tiercel import ref

    losses, grads = [], []
    for logits, target in zip(
        inputs["logits"].split(256), inputs["target"].split(256), strict=True
    ):
        wide = logits.double().requires_grad_()
        loss = ref.cross_entropy(wide, target, reduction=REDUCTION, **options_of(case))
        losses.append(loss.detach())
        if gradient:
            grads.append(torch.autograd.grad(loss, wide)[0].float())
    total = torch.stack(losses).sum()
    return (total, torch.cat(grads)) if gradient else (total,)


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """A sum may be rounded to the logits' dtype; gradients relative to each row's largest."""
    import torch

    dtype = inputs["logits"].dtype
    unit = torch.finfo(dtype).eps / 2
    off = float((outputs[0].double() - expected[0]).abs() / expected[0].abs())
    if not off <= (1e-5 if outputs[0].dtype == torch.float32 else 2 * unit):
        raise WrongResult(f"the loss is off by {off:.1e} of its size")
    if len(expected) == 1:
        return Error(rms=off, maximum=off)
    grad, due = outputs[1], expected[1]
    if grad.shape != due.shape or grad.dtype != dtype:
        raise WrongResult(f"shape {tuple(grad.shape)}, {grad.dtype}")
    worst = squares = largest = due_squares = due_largest = 0.0
    for got, exact in zip(grad.split(1024), due.split(1024), strict=True):
        errors = (got.float() - exact).abs_()
        size = exact.abs().amax(-1, keepdim=True)
        allowed = exact.abs() * (4 * unit + 2e-5) + size * (unit + 4e-6) + 1e-30
        worst = max(worst, float((errors / allowed).max()))
        squares += float(errors.double().square().sum())
        largest = max(largest, float(errors.max()))
        due_squares += float(exact.double().square().sum())
        due_largest = max(due_largest, float(size.max()))
    if not worst <= 1:
        raise WrongResult(f"a gradient is off by {worst:.1f} times its tolerance")
    return Error(rms=(squares / due_squares) ** 0.5, maximum=largest / due_largest)


def _ours_with_gradient(case: Any, inputs: Inputs, backend: str) -> Launch:
    import tiercel

    def loss(logits: Any) -> Any:
        (_, target), options = _call(case, inputs)
        return tiercel.cross_entropy(logits, target, backend=backend, **options)

    details = {"kernel": "cross_entropy_with_gradient"}
    return Launch(lambda: loss_and_gradient(loss, inputs["logits"]), details=details)


def _bench(gradient: bool) -> OpBench:
    return OpBench(
        family="loss",
        op="cross_entropy_with_gradient" if gradient else "cross_entropy",
        params={"T": None, "V": None, "label_smoothing": 0, "softcap": False},
        invalid=_invalid,
        make=_make,
        call=_call,
        out=lambda case, inputs: None,
        bytes_moved=partial(_bytes, gradient),
        reference=partial(_reference, gradient),
        check=_check,
        ours=_ours_with_gradient if gradient else None,
    )


BENCHES = [_bench(gradient) for gradient in (False, True)]
