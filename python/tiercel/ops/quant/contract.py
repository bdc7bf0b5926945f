# SPDX-License-Identifier: Apache-2.0
"""To 8-bit and 4-bit floats and back."""

from __future__ import annotations

from typing import Any

from tiercel.plugins.contract import Case, Contract, ScalarSpec, TensorSpec

_WIDE = ("float32", "bfloat16", "float16")
_TILES = {"tensor": (0, 0), "row": (1, 0), "1x128": (1, 128), "128x128": (128, 128)}


def _random(rows: int, columns: int, dtype: str, values: str, device: str, seed: int) -> Any:
    import torch

    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.randn(rows, columns, generator=generator).exp()
    if values == "special":  # the first value of a few rows
        special = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 3e4, -1e-7])
        x[: len(special), 0] = special[:rows]
        x[len(special) :: 7] = 0.0
    x = x.to(device=device, dtype=getattr(torch, dtype))
    if values == "strided":
        x = torch.cat([x, -x], dim=1)[:, :columns]
    return x


# ---------------------------------------------------------------------------------------- fp8


def _fp8_case(
    rows: int, columns: int, granularity: str, dtype: str = "bfloat16", values: str = "random"
) -> Case:
    return Case({"T": rows, "K": columns}, dtype, {"granularity": granularity}, values)


def _fp8_make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    x = _random(case.sizes["T"], case.sizes["K"], case.dtype, case.values, device, seed)
    scale = torch.full((1, 1), 0.05, device=device) if case.values == "given scale" else None
    return {"x": x, "granularity": case.options["granularity"], "scale": scale}


def _fp8_sizes(sizes: dict[str, int], values: dict[str, Any]) -> dict[str, int]:
    rows, columns = _TILES[values["granularity"]]
    return {
        "scale rows": -(-sizes["T"] // rows) if rows else 1,
        "scale columns": -(-sizes["K"] // columns) if columns else 1,
    }


def _fp8_into(call: Any, x: Any, q: Any, scale: Any, granularity: str) -> None:
    for out, result in zip((q, scale), call(x, granularity, None), strict=True):
        out.copy_(result)


def _fp8_static_into(call: Any, x: Any, scale: Any, q: Any) -> None:
    q.copy_(call(x, "tensor", scale)[0])


FP8_QUANTIZE = Contract(
    family="quant",
    op="fp8_quantize",
    arguments=(
        TensorSpec("x", ("T", "K"), _WIDE, strided=True),
        ScalarSpec("granularity", "str"),
        TensorSpec("scale", ("one", "one"), ("float32",), optional=True),
    ),
    outputs=(
        TensorSpec("q", ("T", "K"), ("float8_e4m3fn",)),
        TensorSpec("scale", ("scale rows", "scale columns"), ("float32",)),
    ),
    cases=(
        *(_fp8_case(33, 256, name) for name in _TILES),
        *(_fp8_case(130, 200, name, "float32") for name in _TILES),
        _fp8_case(64, 4096, "row", "float16"),
        _fp8_case(40, 384, "tensor", values="given scale"),
        _fp8_case(20, 128, "1x128", values="strided"),
        _fp8_case(20, 256, "1x128", "float32", "special"),
        _fp8_case(0, 64, "row"),
    ),
    timing={
        "cpu": _fp8_case(256, 1024, "row"),
        "cuda": _fp8_case(8192, 4096, "1x128"),
    },
    make=_fp8_make,
    variants={
        "fp8_quantize": lambda call, x, granularity: call(x, granularity, None),
        "fp8_quantize_out": _fp8_into,
        "fp8_quantize_static": lambda call, x, scale: call(x, "tensor", scale)[0],
        "fp8_quantize_static_out": _fp8_static_into,
    },
    derive=_fp8_sizes,
)


# -------------------------------------------------------------------------------------- nvfp4


def _nvfp4_case(rows: int, columns: int, dtype: str = "bfloat16", values: str = "random") -> Case:
    return Case({"T": rows, "K": columns}, dtype, {}, values)


def _quantize_make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    x = _random(case.sizes["T"], case.sizes["K"], case.dtype, case.values, device, seed)
    scaled = case.values == "global scale"
    return {"x": x, "global_scale": torch.full((1,), 0.01, device=device) if scaled else None}


def _dequantize_make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    rows, columns = case.sizes["T"], case.sizes["K"]
    q = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scale = torch.rand(rows, columns // 16, generator=generator).to(torch.float8_e4m3fn)
    scaled = case.values == "global scale"
    return {
        "q": q.to(device).view(torch.float4_e2m1fn_x2),
        "scale": scale.to(device),
        "global_scale": torch.full((1,), 0.3, device=device) if scaled else None,
        "dtype": getattr(torch, case.dtype),
    }


def _quantize_sizes(sizes: dict[str, int], values: dict[str, Any]) -> dict[str, int]:
    return {"K / 2": sizes["K"] // 2, "K / 16": sizes["K"] // 16}


def _quantize_into(call: Any, x: Any, *rest: Any) -> None:
    *given, q, scale = rest
    for out, result in zip((q, scale), call(x, *(given or [None])), strict=True):
        out.copy_(result)


def _dequantize_into(call: Any, q: Any, scale: Any, *rest: Any) -> None:
    *given, out = rest
    out.copy_(call(q, scale, *(given or [None]), out.dtype)[0])


_CASES = (
    _nvfp4_case(1, 16),
    _nvfp4_case(33, 272),
    _nvfp4_case(64, 1024, "float16"),
    _nvfp4_case(20, 128, "float32", "global scale"),
    _nvfp4_case(0, 64),
)

NVFP4_QUANTIZE = Contract(
    family="quant",
    op="nvfp4_quantize",
    arguments=(
        TensorSpec("x", ("T", "K"), _WIDE, strided=True),
        TensorSpec("global_scale", ("one",), ("float32",), optional=True),
    ),
    outputs=(
        TensorSpec("q", ("T", "K / 2"), ("float4_e2m1fn_x2",)),
        TensorSpec("scale", ("T", "K / 16"), ("float8_e4m3fn",)),
    ),
    cases=(
        *_CASES,
        _nvfp4_case(20, 128, "bfloat16", "strided"),
        _nvfp4_case(20, 128, "float32", "special"),
    ),
    timing={"cpu": _nvfp4_case(256, 1024), "cuda": _nvfp4_case(8192, 4096)},
    make=_quantize_make,
    variants={
        "nvfp4_quantize": lambda call, x: call(x, None),
        "nvfp4_quantize_out": _quantize_into,
        "nvfp4_quantize_scaled": lambda call, x, global_scale: call(x, global_scale),
        "nvfp4_quantize_scaled_out": _quantize_into,
    },
    derive=_quantize_sizes,
)

NVFP4_DEQUANTIZE = Contract(
    family="quant",
    op="nvfp4_dequantize",
    arguments=(
        TensorSpec("q", ("T", "K / 2"), ("float4_e2m1fn_x2",)),
        TensorSpec("scale", ("T", "K / 16"), ("float8_e4m3fn",)),
        TensorSpec("global_scale", ("one",), ("float32",), optional=True),
        ScalarSpec("dtype", "dtype"),
    ),
    # Two products in float32, each rounded once.
    outputs=(TensorSpec("out", ("T", "K"), ("dtype",), rtol=3e-7),),
    cases=_CASES,
    timing={"cpu": _nvfp4_case(256, 1024), "cuda": _nvfp4_case(8192, 4096)},
    make=_dequantize_make,
    variants={
        "nvfp4_dequantize": lambda call, q, scale, dtype: call(q, scale, None, dtype)[0],
        "nvfp4_dequantize_out": _dequantize_into,
        "nvfp4_dequantize_scaled": lambda call, *values: call(*values)[0],
        "nvfp4_dequantize_scaled_out": _dequantize_into,
    },
    derive=lambda sizes, values: {"K": 2 * sizes["K / 2"]},
)

CONTRACTS = (FP8_QUANTIZE, NVFP4_DEQUANTIZE, NVFP4_QUANTIZE)
