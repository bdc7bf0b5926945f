# SPDX-License-Identifier: Apache-2.0
"""grouped_gemm: groups of rows, each times a matrix of its own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from tiercel.bench.launch import Launch, WrongResult
from tiercel.bench.ops import Error, Inputs, OpBench

_PARAMS = {"M": None, "E": None, "N": None, "K": None}


def _invalid(params: Mapping[str, Any]) -> str | None:
    if all(isinstance(params[name], int) and params[name] > 0 for name in _PARAMS):
        return None
    return "sizes must be positive whole numbers"


def _make(case: Any, device: str, seed: int) -> Inputs:
    """Groups as a good router makes them: of random sizes around the mean."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    rows, groups, columns, k = (case[name] for name in _PARAMS)
    w = torch.empty(groups, columns, k, device=device, dtype=dtype)
    for matrix in w:
        matrix.copy_(torch.randn(columns, k, device=device, generator=generator) * k**-0.5)
    of_rows = torch.randint(0, groups, (rows,), device=device, generator=generator)
    ends = of_rows.bincount(minlength=groups).cumsum(0)
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
    )
]
