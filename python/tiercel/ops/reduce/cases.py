# SPDX-License-Identifier: Apache-2.0
"""Sums, means and maxima."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
_OPS = ("sum", "mean", "amax")


def shape_of(case: Any) -> tuple[int, ...]:
    return tuple(map(int, str(case["shape"]).split("x")))


def dim_of(case: Any) -> int | None:
    return None if case["dim"] == "all" else case["dim"]


def _invalid(params: Mapping[str, Any]) -> str | None:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", str(params["shape"])):
        return "`shape` must be positive whole numbers with an x between, such as 512x512"
    if params["by"] not in _OPS:
        return f"`by` must be one of {', '.join(_OPS)}"
    rank = str(params["shape"]).count("x") + 1
    dim = params["dim"]
    if dim != "all" and (not isinstance(dim, int) or not -rank <= dim < rank):
        return "`dim` must be a dimension of `shape`, or all"
    return None


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(shape_of(case), device=device, generator=generator)
    return {"x": x.to(getattr(torch, case.dtype))}


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (inputs["x"], dim_of(case), case["by"]), {}


def _left(case: Any) -> list[int]:
    shape = list(shape_of(case))
    if case["dim"] == "all":
        return []
    del shape[case["dim"]]
    return shape


def _out(case: Any, inputs: Inputs) -> Any:
    return inputs["x"].new_empty(_left(case))


def _bytes(case: Any) -> int:
    return _ELEMENT[case.dtype] * (math.prod(shape_of(case)) + math.prod(_left(case)))


def reduced(x: Any, dim: int | None, by: str) -> Any:
    """PyTorch's, in the dtype of `x`."""
    if dim is None:
        return getattr(x, by)()
    return getattr(x, by)(dim)


def _reference(case: Any, inputs: Inputs) -> Any:
    return reduced(inputs["x"].double(), dim_of(case), case["by"])


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """The result's rounding, half a unit; and what float32 sums of n numbers of about 1 lose: their
    partial sums are about the root of n, and a sum in one thread is a small part of them.
    """
    import torch

    (result,) = outputs
    if result.shape != expected.shape or result.dtype != inputs["x"].dtype:
        raise WrongResult(f"shape {tuple(result.shape)}, {result.dtype}")
    unit = torch.finfo(result.dtype).eps / 2
    count = inputs["x"].numel() / expected.numel()
    errors = (result.double() - expected).abs()
    tolerance = 1.1 * unit * expected.abs() + 2.0**-18 * count**0.5
    worst = float((errors / tolerance).max())
    if not worst <= 1:
        raise WrongResult(f"a result is off by {worst:.1f} times its tolerance")
    return Error(
        rms=float(errors.square().mean().sqrt() / expected.square().mean().sqrt()),
        maximum=float(errors.max() / expected.abs().max()),
    )


def _torch_sum(case: Any, inputs: Inputs) -> Callable[[], Any]:
    import torch

    x, dim = inputs["x"], dim_of(case)
    return lambda: torch.sum(x, dim)


BENCHES = [
    OpBench(
        family="reduce",
        op="reduce",
        params={"shape": None, "dim": -1, "by": "sum"},
        invalid=_invalid,
        make=_make,
        call=_call,
        out=_out,
        bytes_moved=_bytes,
        reference=_reference,
        check=_check,
        host_baselines={"torch.sum": _torch_sum},
    )
]
