# SPDX-License-Identifier: Apache-2.0
"""toy_shift."""

from __future__ import annotations

from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    return {"x": torch.randn(case["M"], case["N"], device=device, generator=generator)}


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    (result,) = outputs
    if not bool((result == expected).all()):
        raise WrongResult("elements differ")
    return Error(rms=0.0, maximum=0.0)


BENCHES = [
    OpBench(
        family="toy",
        op="toy_shift",
        params={"M": None, "N": None},
        make=_make,
        call=lambda case, inputs: ((inputs["x"],), {}),
        out=lambda case, inputs: inputs["x"].new_empty(inputs["x"].shape),
        bytes_moved=lambda case: 8 * case["M"] * case["N"],
        reference=lambda case, inputs: inputs["x"] + 1,
        check=_check,
    )
]
