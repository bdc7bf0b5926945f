# SPDX-License-Identifier: Apache-2.0
"""causal_conv1d of prompts, and steps with a pool of states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult, in_place
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


def _invalid(params: Mapping[str, Any]) -> str | None:
    sizes = [value for name, value in params.items() if name != "W"]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return "B, T and D must be positive whole numbers"
    return None if params["W"] in (2, 3, 4) else "W must be 2, 3 or 4"


def _random(case: Any, device: str, seed: int, *shape: int) -> Any:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=generator).to(getattr(torch, case.dtype))


def _make(case: Any, device: str, seed: int) -> Inputs:
    batch, tokens, channels, width = (case[name] for name in "BTDW")
    return {
        "x": _random(case, device, seed, batch, tokens, channels),
        "weight": _random(case, device, seed + 1, channels, width),
        "bias": _random(case, device, seed + 2, channels),
    }


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(inputs.values()), {"activation": "silu"}


def _bytes(case: Any) -> int:
    return int(2 * case["B"] * case["T"] * case["D"] * _ELEMENT[case.dtype])


def convolved(x: Any, weight: Any, bias: Any) -> Any:
    """PyTorch's own, of [B, T, D]."""
    import torch

    width = weight.shape[1]
    padded = torch.nn.functional.pad(x.transpose(1, 2), (width - 1, 0))
    out = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=len(weight))
    return torch.nn.functional.silu(out).transpose(1, 2)


def _reference(case: Any, inputs: Inputs) -> Any:
    return (convolved(*(t.double() for t in inputs.values())),)


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """The sum's terms are up to 8, and others may round it before the activation."""
    import torch

    got, due = outputs[0], expected[0]
    if got.shape != due.shape or got.dtype != inputs["x"].dtype:
        raise WrongResult(f"shape {tuple(got.shape)}, {got.dtype}")
    errors = (got.double() - due).abs()
    unit = torch.finfo(got.dtype).eps
    if not bool((errors <= 2 * unit * (due.abs() + 8)).all()):
        raise WrongResult(f"a result is off by {float(errors.max()):.2g}")
    rms = errors.square().mean().sqrt() / due.square().mean().sqrt()
    return Error(rms=float(rms), maximum=float(errors.max() / due.abs().max()))


def _make_update(case: Any, device: str, seed: int) -> Inputs:
    import torch

    batch, channels, width = (case[name] for name in "BDW")
    slots = 2 * batch
    generator = torch.Generator(device=device).manual_seed(seed)
    order = torch.randperm(slots, device=device, generator=generator)[:batch]
    states = _random(case, device, seed + 3, slots, width - 1, channels)
    return {
        "x": _random(case, device, seed, batch, 1, channels),
        "states": states,
        "weight": _random(case, device, seed + 1, channels, width),
        "bias": _random(case, device, seed + 2, channels),
        "state_indices": order.int(),
        "first": states.clone(),
    }


def _call_update(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, states, weight, bias, indices, _ = inputs.values()
    options = {"state_indices": indices, "activation": "silu"}
    return (x, states, weight, x.new_empty(x.shape), bias), options


def _ours_update(case: Any, inputs: Inputs, backend: str) -> Launch:
    import tiercel

    given, options = _call_update(case, inputs)

    def run() -> tuple[Any]:
        return (tiercel.causal_conv1d_update(*given, **options, backend=backend)[1],)

    expected = _reference_update(case, inputs)
    return in_place(
        run,
        reset=lambda: inputs["states"].copy_(inputs["first"]),
        check=lambda outputs: _check(inputs, expected, outputs, Launch(run)),
    )


def _bytes_update(case: Any) -> int:
    """x, out, and each state read and written."""
    return int(2 * case["B"] * case["W"] * case["D"] * _ELEMENT[case.dtype])


def _reference_update(case: Any, inputs: Inputs) -> Any:
    import torch

    x, _, weight, bias, indices, first = inputs.values()
    window = torch.cat([first[indices.long()], x], 1).double()
    total = (window * weight.double().t()).sum(1) + bias.double()
    return (torch.nn.functional.silu(total)[:, None],)


BENCHES = [
    OpBench(
        family="conv",
        op="causal_conv1d",
        params={"B": 1, "T": None, "D": None, "W": 4},
        invalid=_invalid,
        make=_make,
        call=_call,
        out=lambda case, inputs: inputs["x"].new_empty(inputs["x"].shape),
        bytes_moved=_bytes,
        reference=_reference,
        check=_check,
    ),
    OpBench(
        family="conv",
        op="causal_conv1d_update",
        params={"B": None, "D": None, "W": 4},
        invalid=_invalid,
        make=_make_update,
        call=_call_update,
        out=lambda case, inputs: None,
        bytes_moved=_bytes_update,
        reference=_reference_update,
        check=_check,
        ours=_ours_update,
    ),
]
