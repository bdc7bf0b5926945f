# SPDX-License-Identifier: Apache-2.0
"""grouped_gemm of float8 rows and matrices with scales of blocks, in both of its layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.ops.moe.cases import Wide, check_product, in_blocks
from tiercel.workbench.bench.launch import Launch
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_SIZES = ("M", "E", "N", "K")
# capacity: rows of memory per group, of which a group uses some; 0: groups follow one another.
_PARAMS = {**dict.fromkeys(_SIZES), "capacity": 0, "aligned": False}
_ALIGNMENT = 128  # rows: where "aligned" groups begin, which is what DeepGEMM takes


def _invalid(params: Mapping[str, Any]) -> str | None:
    if not all(isinstance(params[name], int) and params[name] > 0 for name in _SIZES):
        return "sizes must be positive whole numbers"
    if params["N"] % 128 or params["K"] % 128:
        return "N and K must be multiples of 128"
    if params["aligned"] and (params["M"] % _ALIGNMENT or params["capacity"]):
        return f"aligned groups follow one another, with a multiple of {_ALIGNMENT} rows"
    return None


def _make(case: Any, device: str, seed: int) -> Inputs:
    """Groups as a good router makes them: of random sizes around the mean."""
    import torch

    from tiercel.ops.quant.reference import fp8_quantize

    generator = torch.Generator(device=device).manual_seed(seed)
    rows, groups, columns, k = (case[name] for name in _SIZES)
    w = torch.empty(groups, columns, k, device=device, dtype=torch.bfloat16)
    for matrix in w:
        matrix.copy_(torch.randn(columns, k, device=device, generator=generator) * k**-0.5)
    narrow, w_scale = in_blocks(w)
    unit = _ALIGNMENT if case["aligned"] else 1
    of_rows = torch.randint(0, groups, (rows // unit,), device=device, generator=generator)
    counts = of_rows.bincount(minlength=groups) * unit
    capacity = case["capacity"]
    sizes = (groups * capacity, k) if capacity else (rows, k)
    x = torch.randn(sizes, device=device, generator=generator).bfloat16()
    values, x_scale = fp8_quantize(x, "1x128")
    if capacity:
        return {
            "x": values.view(groups, capacity, k),
            "w": narrow,
            "offsets": None,
            "counts": counts.clamp(max=capacity).int(),
            "x_scale": x_scale.view(groups, capacity, -1),
            "w_scale": w_scale,
            "expected_rows": -(-rows // groups),
        }
    ends = counts.cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends]).int()
    return {"x": values, "w": narrow, "offsets": offsets, "x_scale": x_scale, "w_scale": w_scale}


def used_rows(inputs: Inputs, result: Any) -> Any:
    """The rows of a result that are written."""
    import torch

    if inputs["offsets"] is not None:
        return result
    places = torch.arange(result.shape[1], device=result.device)
    return result[places < inputs["counts"][:, None]]


def _reference(case: Any, inputs: Inputs) -> Any:
    from tiercel.ops.moe import reference as ref

    wide = {"x": inputs["x"].double(), "w": Wide(inputs["w"])}
    given = {name: value for name, value in inputs.items() if name != "expected_rows"}
    return used_rows(inputs, ref.grouped_gemm(**given | wide))


def check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch | None) -> Error:
    return check_product(expected, used_rows(inputs, *outputs))


def _ours(case: Any, inputs: Inputs, backend: str) -> Launch:
    import tiercel

    explanation = tiercel.explain(tiercel.grouped_gemm, **inputs, backend=backend)
    return Launch(
        lambda: (tiercel.grouped_gemm(**inputs, backend=backend),),
        strict=True,
        details={"kernel": explanation.configuration.get("kernel", explanation.backend)},
    )


def _bytes(case: Any) -> int:
    """The matrices of groups with rows, and the rows; scales are little beside them."""
    rows, groups, columns, k = (case[name] for name in _SIZES)
    active = groups * (1 - (1 - 1 / groups) ** rows)
    return int(active * columns * k + rows * (k + 2 * columns))


BENCHES = [
    OpBench(
        family="moe",
        op="grouped_gemm_fp8",
        params=_PARAMS,
        invalid=_invalid,
        make=_make,
        call=lambda case, inputs: ((), inputs),
        out=lambda case, inputs: None,
        bytes_moved=_bytes,
        flops=lambda case: 2 * case["M"] * case["N"] * case["K"],
        reference=_reference,
        check=check,
        ours=_ours,
    ),
]
