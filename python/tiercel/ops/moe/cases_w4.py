# SPDX-License-Identifier: Apache-2.0
"""w4_moe: experts with 4-bit weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.ops.moe import cases
from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench, judged

_GROUPS = {"nvfp4": 16, "mxfp4": 32, "int4": 128}
_GPT_OSS = {"activation": "silu_residual", "alpha": 1.702, "limit": 7.0, "interleaved": True}


def _invalid(params: Mapping[str, Any]) -> str | None:
    if params["format"] not in _GROUPS:
        return f"format must be one of {', '.join(_GROUPS)}"
    if params["float8"] and params["format"] == "nvfp4":
        return "float8 activations do not go with nvfp4"
    unit = 128 if params["format"] == "int4" else 64
    if params["H"] % unit or params["I"] % unit:
        return f"H and I must be multiples of {unit}"
    sizes = {name: value for name, value in params.items() if name not in ("format", "float8")}
    return cases.invalid(sizes)


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    options = {"device": device, "generator": generator}
    experts, hidden, inner = case["E"], case["H"], case["I"]
    dtype = getattr(torch, case.dtype)

    def half(rows: int, columns: int) -> tuple[Any, ...]:
        shape = (experts, rows, columns // _GROUPS[case["format"]])
        codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, **options)
        if case["format"] == "mxfp4":
            scale = torch.randint(121, 124, shape, dtype=torch.uint8, **options)
        elif case["format"] == "nvfp4":
            scale = (torch.rand(shape, **options) / 32 + 0.02).to(torch.float8_e4m3fn)
        else:
            scale = (torch.rand(shape, **options) / 64 + 0.01).to(dtype)
        return codes, scale, torch.randn(experts, rows, **options).to(dtype)

    w_up, up_scale, up_bias = half(2 * inner, hidden)
    w_down, down_scale, down_bias = half(hidden, inner)
    weights = torch.rand(case["T"], case["k"], **options)
    scores = torch.rand(case["T"], experts, **options)
    x, quantized = torch.randn(case["T"], hidden, **options).to(dtype), {}
    if case["float8"]:
        x_scale = x.float().abs().amax(-1, keepdim=True) / 448
        x, quantized = (x / x_scale).to(torch.float8_e4m3fn), {"x_scale": x_scale}
    return {
        "x": x,
        "w_up": w_up,
        "w_up_scale": up_scale,
        "w_down": w_down,
        "w_down_scale": down_scale,
        "topk_weights": weights / weights.sum(dim=1, keepdim=True),
        "topk_ids": scores.topk(case["k"]).indices.int(),
        "up_bias": up_bias,
        "down_bias": down_bias,
        **quantized,
    }


def _bytes(case: Any) -> int:
    """The active experts' weights and scales; activations are little beside them."""
    group = _GROUPS[case["format"]]
    of_value = 0.5 + (2 if case["format"] == "int4" else 1) / group
    matrices = 3 * case["I"] * case["H"] * of_value
    return int(cases.active(case) * matrices + 4 * case["T"] * case["H"])


def _reference(case: Any, inputs: Inputs) -> Any:
    from tiercel.ops.moe import reference as ref

    wide = dict(inputs)
    wide["x"] = inputs["x"].double()
    if case["float8"]:
        wide["x"] *= wide.pop("x_scale").double()
    return ref.w4_moe(**wide, format=case["format"], **_GPT_OSS)


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """In units of the dtype's rounding: one of int4's weights, one between the halves, one of each
    expert's output, one of the sum. With float8 activations those between the halves are rounded to
    e4m3, by up to 2^-4 and about 2^-5.3 (root mean square)."""
    import torch

    (result,) = outputs
    float8 = "x_scale" in inputs
    due = torch.bfloat16 if float8 else inputs["x"].dtype
    if result.shape != expected.shape or result.dtype != due:
        raise WrongResult(f"shape {tuple(result.shape)}, {result.dtype}")
    unit = 2.0**-5.5 if float8 else torch.finfo(result.dtype).eps / 2
    tolerance = 1.5 * unit * (expected.abs() + 6 * expected.square().mean().sqrt())
    return judged((result.double() - expected).abs(), expected, tolerance, 2 * unit)


BENCHES = [
    OpBench(
        family="moe",
        op="w4_moe",
        params={
            **dict.fromkeys(("T", "E", "k", "H", "I")),
            "format": "mxfp4",
            "float8": False,
        },
        invalid=_invalid,
        make=_make,
        call=lambda case, inputs: (
            tuple(inputs.values())[:7],
            {
                "format": case["format"],
                "up_bias": inputs["up_bias"],
                "down_bias": inputs["down_bias"],
                **({"x_scale": inputs["x_scale"]} if case["float8"] else {}),
                **_GPT_OSS,
            },
        ),
        out=lambda case, inputs: None,
        bytes_moved=_bytes,
        flops=lambda case: 6 * int(case["T"] * case["k"] * case["H"] * case["I"]),
        reference=_reference,
        check=_check,
    ),
]
