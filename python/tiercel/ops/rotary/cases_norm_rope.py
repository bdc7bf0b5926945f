# SPDX-License-Identifier: Apache-2.0
"""qk_norm_rope and its gradients: a forward and a backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tiercel.ops.rotary import cases
from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_LEAVES = ("q", "k", "q_weight", "k_weight")


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    rotary = cases.make_rotary(case, device, seed)
    generator = torch.Generator(device=device).manual_seed(seed + 1000)
    like = {"device": device, "generator": generator}
    q, k = rotary["q"], rotary["k"]
    return {
        "q": q,
        "k": k,
        "positions": rotary["positions"],
        "cos_sin_cache": rotary["cache"],
        "q_weight": (torch.rand(case["D"], **like) + 0.5).to(q.dtype),
        "k_weight": (torch.rand(case["D"], **like) + 0.5).to(q.dtype),
        "grad_q": torch.randn(q.shape, **like).to(q.dtype),
        "grad_k": torch.randn(k.shape, **like).to(q.dtype),
    }


def step(function: Callable[..., Any], inputs: Inputs) -> tuple[Any, ...]:
    """Runs forward and backward of a function of q, k, positions, angles and weights."""
    import torch

    leaves = {name: inputs[name].detach().requires_grad_() for name in _LEAVES}
    given = (leaves["q"], leaves["k"], inputs["positions"], inputs["cos_sin_cache"])
    out = function(*given, leaves["q_weight"], leaves["k_weight"])
    grads = torch.autograd.grad(out, list(leaves.values()), (inputs["grad_q"], inputs["grad_k"]))
    return (*(each.detach() for each in out), *grads)


def _reference(case: Any, inputs: Inputs) -> Any:
    """In float64, a few tokens at a time; sums over tokens are those of the parts."""
    import torch

    from tiercel.ops.rotary.reference import qk_norm_rope

    function = partial(qk_norm_rope, interleaved=case["style"] == "interleaved")
    parts = []
    for first in range(0, case["T"], 4096):
        part = {
            name: value if name in ("cos_sin_cache", *_LEAVES[2:]) else value[first : first + 4096]
            for name, value in inputs.items()
        }
        wide = {n: t.double() if t.is_floating_point() else t for n, t in part.items()}
        parts.append([t.float() if t.dim() > 1 else t for t in step(function, wide)])
    pairs = zip(*parts, strict=True)
    return tuple(torch.cat(each) if each[0].dim() > 1 else sum(each) for each in pairs)


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """Others may round after each step, forward and backward: four units."""
    import torch

    worst = Error(rms=0.0, maximum=0.0)
    names = ("q_out", "k_out", *_LEAVES)
    for name, got, due in zip(names, outputs, expected, strict=True):
        if got.shape != due.shape or got.dtype != inputs["q"].dtype:
            raise WrongResult(f"{name}: shape {tuple(got.shape)}, {got.dtype}")
        unit = torch.finfo(got.dtype).eps / 2
        errors = (got.float() - due).abs()
        rms = float(errors.square().mean().sqrt() / due.square().mean().sqrt())
        if not rms <= 4 * unit:
            raise WrongResult(f"{name}: RMS error {rms:.1e}, tolerance {4 * unit:.1e}")
        largest = float(errors.max() / due.abs().max())
        worst = Error(rms=max(worst.rms, rms), maximum=max(worst.maximum, largest))
    return worst


def _ours(case: Any, inputs: Inputs, backend: str) -> Launch:
    import tiercel

    interleaved = case["style"] == "interleaved"
    function = partial(tiercel.qk_norm_rope, interleaved=interleaved, backend=backend)
    return Launch(lambda: step(function, inputs), details={"kernel": "qk_norm_rope and backward"})


def _bytes(case: Any) -> int:
    """The forward reads and writes heads once; the backward reads two and writes one."""
    return 5 * int(case["T"] * (case["H"] + case["G"]) * case["D"]) * cases.ELEMENT[case.dtype]


BENCHES = [
    OpBench(
        family="rotary",
        op="qk_norm_rope_with_gradient",
        params={"T": None, "H": 32, "G": 8, "D": 128, "R": 128, "style": "neox"},
        invalid=cases.invalid_rotary,
        make=_make,
        call=lambda case, inputs: (tuple(inputs.values()), {}),
        out=lambda case, inputs: None,
        bytes_moved=_bytes,
        reference=_reference,
        check=_check,
        ours=_ours,
    )
]
