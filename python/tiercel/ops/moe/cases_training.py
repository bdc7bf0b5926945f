# SPDX-License-Identifier: Apache-2.0
"""fused_moe and its gradients: a forward and a backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tiercel.ops.moe import cases
from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_LEAVES = ("x", "w_up", "w_down", "topk_weights")


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed + 1000)
    inputs = cases.make(case, device, seed)
    grad = torch.randn(inputs["x"].shape, device=device, generator=generator)
    return {**inputs, "grad": grad.to(inputs["x"].dtype)}


def step(function: Callable[..., Any], inputs: Inputs) -> tuple[Any, ...]:
    """Runs forward and backward of a function of the tokens, the weights and the routing."""
    import torch

    leaves = [inputs[name].detach().requires_grad_() for name in _LEAVES]
    out = function(*leaves, inputs["topk_ids"])
    return (out.detach(), *torch.autograd.grad(out, leaves, inputs["grad"]))


def memory(function: Callable[..., Any], inputs: Inputs) -> dict[str, Any]:
    """The most memory that a step takes beside its inputs, its results included."""
    import torch

    if inputs["x"].device.type != "cuda":
        return {}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(function, inputs)
    return {"peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}


def _reference(case: Any, inputs: Inputs) -> Any:
    """In float64, an expert at a time; the results are float32, which is less memory."""
    import torch

    from tiercel.ops.moe import reference as ref

    x, grad, ids = inputs["x"], inputs["grad"], inputs["topk_ids"]
    wide = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    out, of_x = wide, wide.clone()
    of_weights = torch.zeros_like(inputs["topk_weights"])
    of_up, of_down = (
        torch.zeros(inputs[name].shape, dtype=torch.float32, device=x.device)
        for name in ("w_up", "w_down")
    )
    for expert in range(case["E"]):
        token, place = (ids == expert).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        one = torch.zeros(len(token), 1, dtype=torch.int32, device=x.device)
        given = (x[token], *(inputs[name][expert : expert + 1] for name in ("w_up", "w_down")))
        given = (*given, inputs["topk_weights"][token, place][:, None])
        leaves = [t.double().requires_grad_() for t in given]
        result = ref.fused_moe(*leaves, one, activation=case["act"])
        found = torch.autograd.grad(result, leaves, grad[token].double())
        out.index_add_(0, token, result.detach())
        of_x.index_add_(0, token, found[0])
        of_up[expert], of_down[expert] = found[1][0], found[2][0]
        of_weights[token, place] = found[3][:, 0].float()
    return out.float(), of_x.float(), of_up, of_down, of_weights


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """Values are rounded in front of a gradient up to five times; of a sum of such the error is
    that of one."""
    import torch

    unit = torch.finfo(inputs["x"].dtype).eps / 2
    worst = Error(rms=0.0, maximum=0.0)
    for name, got, due in zip(("out", *_LEAVES), outputs, expected, strict=True):
        dtype = torch.float32 if name == "topk_weights" else inputs["x"].dtype
        if got.shape != due.shape or got.dtype != dtype:
            raise WrongResult(f"{name}: shape {tuple(got.shape)}, {got.dtype}")
        squares = errors = largest = 0.0
        for part, exact in zip(got.split(4096), due.split(4096), strict=True):
            difference = part.float() - exact
            squares += float(exact.double().square().sum())
            errors += float(difference.double().square().sum())
            largest = max(largest, float(difference.abs().max()))
        rms = (errors / squares) ** 0.5
        if not rms <= 3 * unit:
            raise WrongResult(f"{name}: RMS error {rms:.1e}, tolerance {3 * unit:.1e}")
        worst = Error(
            rms=max(worst.rms, rms), maximum=max(worst.maximum, largest / float(due.abs().max()))
        )
    return worst


def _ours(case: Any, inputs: Inputs, backend: str) -> Launch:
    import tiercel

    function = partial(tiercel.fused_moe, activation=case["act"], backend=backend)
    details = {"kernel": "fused_moe_with_gradient", **memory(function, inputs)}
    return Launch(lambda: step(function, inputs), details=details)


def _bytes(case: Any) -> int:
    """Weights twice and their gradients; tokens, the result and their gradients."""
    matrices = 3 * case["E"] * case["I"] * case["H"]
    return int(2 * (3 * matrices + 4 * case["T"] * case["H"]))


BENCHES = [
    OpBench(
        family="moe",
        op="fused_moe_with_gradient",
        params={"T": None, "E": None, "k": None, "H": None, "I": None, "act": "silu"},
        invalid=cases.invalid,
        make=_make,
        call=lambda case, inputs: (tuple(inputs.values()), {}),
        out=lambda case, inputs: None,
        bytes_moved=_bytes,
        flops=lambda case: 18 * int(case["T"] * case["k"] * case["H"] * case["I"]),
        reference=_reference,
        check=_check,
        ours=_ours,
    )
]
