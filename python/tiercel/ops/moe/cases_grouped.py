# SPDX-License-Identifier: Apache-2.0
"""grouped_gemm: groups of rows, each times a matrix of its own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_SIZES = ("M", "E", "N", "K")
_PARAMS = {**dict.fromkeys(_SIZES), "aligned": False}
_ALIGNMENT = 128  # rows: where "aligned" groups begin, which is what DeepGEMM takes


def _invalid(params: Mapping[str, Any]) -> str | None:
    if not all(isinstance(params[name], int) and params[name] > 0 for name in _SIZES):
        return "sizes must be positive whole numbers"
    if params["aligned"] and params["M"] % _ALIGNMENT:
        return f"aligned groups have a multiple of {_ALIGNMENT} rows"
    return None


def _make(case: Any, device: str, seed: int) -> Inputs:
    """Groups as a good router makes them: of random sizes around the mean."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    rows, groups, columns, k = (case[name] for name in _SIZES)
    unit = _ALIGNMENT if case["aligned"] else 1
    w = torch.empty(groups, columns, k, device=device, dtype=dtype)
    for matrix in w:
        matrix.copy_(torch.randn(columns, k, device=device, generator=generator) * k**-0.5)
    of_rows = torch.randint(0, groups, (rows // unit,), device=device, generator=generator)
    ends = of_rows.bincount(minlength=groups).cumsum(0) * unit
    return {
        "x": torch.randn(rows, k, device=device, generator=generator).to(dtype),
        "w": w,
        "offsets": torch.cat([ends.new_zeros(1), ends]).int(),
    }


def _reference(case: Any, inputs: Inputs) -> Any:
    import torch

    x, w, offsets = inputs.values()
    bounds = offsets.tolist()
    groups = enumerate(itertools.pairwise(bounds))
    return torch.cat([x[a:b].double() @ w[e].double().T for e, (a, b) in groups])


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """One rounding of sums in float32."""
    import torch

    (result,) = outputs
    if result.shape != expected.shape or result.dtype != inputs["x"].dtype:
        raise WrongResult(f"shape {tuple(result.shape)}, {result.dtype}")
    errors = (result.double() - expected).abs()
    unit = torch.finfo(result.dtype).eps / 2
    worst = float((errors / (unit * expected.abs() + 1e-4)).max())
    if not worst <= 1.1:
        raise WrongResult(f"a result is off by {worst:.1f} times its tolerance")
    scale = expected.square().mean().sqrt()
    rms = float(errors.square().mean().sqrt() / scale)
    return Error(rms=rms, maximum=float(errors.max() / expected.abs().max()))


# The gradients of x and w, which one call of the backward makes.


def _make_backward(case: Any, device: str, seed: int) -> Inputs:
    import torch

    inputs = _make(case, device, seed)
    generator = torch.Generator(device=device).manual_seed(seed + 1000)
    grad = torch.randn(case["M"], case["N"], device=device, generator=generator)
    return {"grad": grad.to(inputs["x"].dtype), **inputs}


def _backward_reference(case: Any, inputs: Inputs) -> Any:
    """A group at a time, and rounded: all of w in float64 would not fit."""
    import torch

    grad, x, w, offsets = inputs.values()
    groups = list(enumerate(itertools.pairwise(offsets.tolist())))
    of_x = torch.cat([grad[a:b].double() @ w[e].double() for e, (a, b) in groups])
    of_w = torch.empty(w.shape, dtype=torch.float32, device=w.device)
    for e, (a, b) in groups:
        of_w[e] = grad[a:b].double().T @ x[a:b].double()
    return of_x, of_w


def _check_backward(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """One rounding of sums in float32, which grow with a group's rows."""
    import torch

    worst = Error(rms=0.0, maximum=0.0)
    for result, due in zip(outputs, expected, strict=True):
        if result.shape != due.shape or result.dtype != inputs["x"].dtype:
            raise WrongResult(f"shape {tuple(result.shape)}, {result.dtype}")
        scale = due.square().mean(dtype=torch.float64).sqrt()
        unit, squares, largest = torch.finfo(result.dtype).eps / 2, 0.0, 0.0
        for mine, there in zip(result.split(4096), due.split(4096), strict=True):
            errors = (mine.double() - there.double()).abs()
            off = float((errors / (unit * there.abs() + 1e-4 * scale)).max())
            if not off <= 1.1:
                raise WrongResult(f"a result is off by {off:.1f} times its tolerance")
            squares += float(errors.square().sum())
            largest = max(largest, float(errors.max()))
        rms = (squares / due.numel()) ** 0.5 / float(scale)
        worst = Error(
            rms=max(rms, worst.rms), maximum=max(largest / float(due.abs().max()), worst.maximum)
        )
    return worst


def _ours_backward(case: Any, inputs: Inputs, backend: str) -> Launch:
    """The operators that the gradient calls; a user meets them only in ``backward()``."""
    import torch

    grad, x, w, offsets = inputs.values()
    of_x: Any = torch.ops.tiercel.grouped_gemm_backward_x
    of_w: Any = torch.ops.tiercel.grouped_gemm_backward_weight

    def run() -> tuple[Any, ...]:
        return of_x(grad, w, offsets, backend), of_w(grad, x, offsets, backend)

    return Launch(run, strict=True, details={"kernel": "grouped_gemm_backward"})


BENCHES = [
    OpBench(
        family="moe",
        op="grouped_gemm",
        params=_PARAMS,
        invalid=_invalid,
        make=_make,
        call=lambda case, inputs: (tuple(inputs.values()), {}),
        out=lambda case, inputs: None,
        bytes_moved=lambda case: (
            2 * (case["E"] * case["N"] * case["K"] + case["M"] * (case["N"] + case["K"]))
        ),
        flops=lambda case: 2 * case["M"] * case["N"] * case["K"],
        reference=_reference,
        check=_check,
    ),
    OpBench(
        family="moe",
        op="grouped_gemm_backward",
        params=_PARAMS,
        invalid=_invalid,
        make=_make_backward,
        call=lambda case, inputs: (tuple(inputs.values()), {}),
        out=lambda case, inputs: None,
        bytes_moved=lambda case: (
            4 * (case["E"] * case["N"] * case["K"] + case["M"] * (case["N"] + case["K"]))
        ),
        flops=lambda case: 4 * case["M"] * case["N"] * case["K"],
        reference=_backward_reference,
        check=_check_backward,
        ours=_ours_backward,
    ),
]
