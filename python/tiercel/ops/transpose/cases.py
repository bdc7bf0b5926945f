# SPDX-License-Identifier: Apache-2.0
"""Transposed copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def _invalid(params: Mapping[str, Any]) -> str | None:
    sizes = [params[name] for name in "MNB"]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return "M, N and B must be positive whole numbers"
    tile = params["tile_size"]
    if tile is not False and (tile is True or tile not in (32, 64, 128)):
        return "tile_size must be 32, 64 or 128, or false for the heuristic's choice"
    return None


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (case["M"], case["N"]) if case["B"] == 1 else (case["B"], case["M"], case["N"])
    x = torch.randn(shape, device=device, generator=generator)
    return {"x": x.to(getattr(torch, case.dtype))}


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (inputs["x"],), {"tile_size": case["tile_size"] or None}


def _out(case: Any, inputs: Inputs) -> Any:
    x = inputs["x"]
    return x.new_empty((*x.shape[:-2], x.shape[-1], x.shape[-2]))


def _bytes(case: Any) -> int:
    return 2 * int(case["M"] * case["N"] * case["B"]) * _ELEMENT[case.dtype]


def _bits(x: Any) -> Any:
    import torch

    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def _reference(case: Any, inputs: Inputs) -> Any:
    return _bits(inputs["x"]).transpose(-2, -1)


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """A copy: every bit."""
    (result,) = outputs
    if result.shape != expected.shape or result.dtype != inputs["x"].dtype:
        raise WrongResult(f"shape {tuple(result.shape)}, {result.dtype}")
    if not result.is_contiguous():
        raise WrongResult("the result is not contiguous")
    wrong = int((_bits(result) != expected).sum())
    if wrong:
        raise WrongResult(f"{wrong} of {expected.numel()} elements differ")
    return Error(rms=0.0, maximum=0.0)


def _torch_contiguous(case: Any, inputs: Inputs) -> Any:
    x = inputs["x"]
    return lambda: x.transpose(-2, -1).contiguous()


BENCHES = [
    OpBench(
        family="transpose",
        op="copy_transpose",
        params={"M": None, "N": None, "B": 1, "tile_size": False},
        invalid=_invalid,
        make=_make,
        call=_call,
        out=_out,
        bytes_moved=_bytes,
        reference=_reference,
        check=_check,
        host_baselines={"torch.contiguous": _torch_contiguous},
    )
]
