# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy: the loss alone, and the loss with the gradients of x and weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


def _invalid(params: Mapping[str, Any]) -> str | None:
    if not all(isinstance(params[name], int) and params[name] > 0 for name in "THV"):
        return "T, H and V must be positive whole numbers"
    return None


def _make(case: Any, device: str, seed: int) -> Inputs:
    """Targets are as words are: few of them are most of all."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype, (rows, hidden, classes) = getattr(torch, case.dtype), (case[name] for name in "THV")
    x = torch.randn(rows, hidden, device=device, generator=generator).to(dtype)
    weight = torch.empty(classes, hidden, device=device, dtype=dtype)
    for part in weight.split(8192):
        part.copy_(torch.randn(part.shape, device=device, generator=generator) * hidden**-0.5)
    drawn = torch.rand(rows, device=device, generator=generator, dtype=torch.float64)
    return {"x": x, "weight": weight, "target": (classes * drawn**4).long()}


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(inputs.values()), {}


def _bytes(gradient: bool, case: Any) -> int:
    both = case["T"] * case["H"] + case["V"] * case["H"]
    return int(both * _ELEMENT[case.dtype] * (1 + gradient) + 8 * case["T"])


def _flops(gradient: bool, case: Any) -> int:
    return int(2 * case["T"] * case["H"] * case["V"] * (1 + 2 * gradient))


def step(function: Callable[..., Any], inputs: Inputs) -> tuple[Any, ...]:
    """Runs forward and backward of `function`, which returns the mean loss."""
    import torch

    leaves = [inputs[name].detach().requires_grad_() for name in ("x", "weight")]
    loss = function(*leaves, inputs["target"])
    return (loss.detach(), *torch.autograd.grad(loss, leaves))


def _reference(gradient: bool, case: Any, inputs: Inputs) -> Any:
    """In float64, some rows at a time."""
    import torch

    from tiercel import ref

    weight = inputs["weight"].double().requires_grad_(gradient)
    total, grads = 0.0, []
    for x, target in zip(inputs["x"].split(512), inputs["target"].split(512), strict=True):
        x = x.double().requires_grad_(gradient)
        loss = ref.linear_cross_entropy(x, weight, target, reduction="sum") / case["T"]
        if gradient:
            loss.backward()
            grads.append(x.grad)
        total = total + loss.detach()
    if not gradient:
        return (torch.as_tensor(total),)
    return total, torch.cat(grads).float(), weight.grad.float()


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """Logits are rounded, which changes a probability by their size: up to 5 units. Chunks' sums
    may be rounded on top of that."""
    import torch

    unit = torch.finfo(inputs["x"].dtype).eps / 2
    off = float((outputs[0].double() - expected[0]).abs() / expected[0].abs())
    if not off <= 2 * unit:
        raise WrongResult(f"the loss is off by {off:.1e} of its size")
    worst = Error(rms=off, maximum=off)
    for got, due in zip(outputs[1:], expected[1:], strict=True):
        if got.shape != due.shape or got.dtype != inputs["x"].dtype:
            raise WrongResult(f"shape {tuple(got.shape)}, {got.dtype}")
        squares = sum(float(d.double().square().sum()) for d in due.split(8192))
        errors = largest = 0.0
        for part, exact in zip(got.split(8192), due.split(8192), strict=True):
            difference = part.float() - exact
            errors += float(difference.double().square().sum())
            largest = max(largest, float(difference.abs().max()))
        rms = (errors / squares) ** 0.5
        if not rms <= 6 * unit:
            raise WrongResult(f"RMS error {rms:.1e} of a gradient, tolerance {6 * unit:.1e}")
        worst = Error(
            rms=max(worst.rms, rms), maximum=max(worst.maximum, largest / float(due.abs().max()))
        )
    return worst


def _ours_with_gradient(case: Any, inputs: Inputs, backend: str) -> Launch:
    import tiercel

    loss = partial(tiercel.linear_cross_entropy, backend=backend)
    details = {"kernel": "linear_cross_entropy_with_gradient"}
    return Launch(lambda: step(loss, inputs), details=details)


def _bench(gradient: bool) -> OpBench:
    return OpBench(
        family="loss",
        op="linear_cross_entropy_with_gradient" if gradient else "linear_cross_entropy",
        params={"T": None, "H": None, "V": None},
        invalid=_invalid,
        make=_make,
        call=_call,
        out=lambda case, inputs: None,
        bytes_moved=partial(_bytes, gradient),
        flops=partial(_flops, gradient),
        reference=partial(_reference, gradient),
        check=_check,
        ours=_ours_with_gradient if gradient else None,
    )


BENCHES = [_bench(gradient) for gradient in (False, True)]
