# SPDX-License-Identifier: Apache-2.0
"""Smoke cases of the quantising ops, and the contracts of their plug-ins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiercel.core.spec import Spec, Tensor
from tiercel.ops.quant.spec import (
    ACT_AND_MUL_QUANT,
    FP8_QUANTIZE,
    FP8_QUANTIZE_TRANSPOSE,
    LAYER_NORM_QUANT,
    NVFP4_DEQUANTIZE,
    NVFP4_QUANTIZE,
    RMS_NORM_QUANT,
    TILES,
    TURNED_GRANULARITIES,
    scale_shape,
)
from tiercel.plugins.contract import Case, Contract, TensorSpec


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
    rows, columns = TILES[values["granularity"]]
    return {
        "scale rows": -(-sizes["T"] // rows) if rows else 1,
        "scale columns": -(-sizes["K"] // columns) if columns else 1,
    }


def _transpose_sizes(sizes: dict[str, int], values: dict[str, Any]) -> dict[str, int]:
    down, across = (-(-sizes[name] // 128) for name in "TK")
    tiles = values["granularity"] == "128x128"
    return _fp8_sizes(sizes, values) | {
        "P": down * 128,
        "scale_t rows": across if tiles else down,
        "scale_t columns": down if tiles else sizes["K"],
    }


_FP8 = replace(
    Contract.of(
        "quant",
        FP8_QUANTIZE,
        cases=(
            *(_fp8_case(33, 256, name) for name in TILES),
            *(_fp8_case(130, 200, name, "float32") for name in TILES),
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
        derive=_fp8_sizes,
    ),
    outputs=(
        TensorSpec("q", ("T", "K"), ("float8_e4m3fn",)),
        TensorSpec("scale", ("scale rows", "scale columns"), ("float32",)),
    ),
)


_FP8_TRANSPOSE = replace(
    Contract.of(
        "quant",
        FP8_QUANTIZE_TRANSPOSE,
        cases=(
            *(_fp8_case(33, 256, name) for name in TURNED_GRANULARITIES),
            *(_fp8_case(130, 200, name, "float32") for name in TURNED_GRANULARITIES),
            _fp8_case(256, 1024, "1x128", "float16"),
            _fp8_case(20, 128, "1x128", values="strided"),
            _fp8_case(20, 256, "1x128", "float32", "special"),
            _fp8_case(0, 64, "1x128"),
        ),
        timing={
            "cpu": _fp8_case(256, 1024, "1x128"),
            "cuda": _fp8_case(8192, 4096, "1x128"),
        },
        make=lambda case, device, seed: {
            "x": _random(case.sizes["T"], case.sizes["K"], case.dtype, case.values, device, seed),
            "granularity": case.options["granularity"],
        },
        derive=_transpose_sizes,
    ),
    outputs=(
        TensorSpec("q", ("T", "K"), ("float8_e4m3fn",)),
        TensorSpec("scale", ("scale rows", "scale columns"), ("float32",)),
        TensorSpec("q_t", ("K", "P"), ("float8_e4m3fn",)),
        TensorSpec("scale_t", ("scale_t rows", "scale_t columns"), ("float32",)),
    ),
)


# ------------------------------------------------------------- norms and activations to fp8


def _fused_case(
    rows: int,
    columns: int,
    granularity: str,
    dtype: str = "bfloat16",
    values: str = "",
    **more: str,
) -> Case:
    return Case({"T": rows, "N": columns}, dtype, {"granularity": granularity} | more, values)


def _made(case: Case, columns: int, device: str, seed: int) -> dict[str, Any]:
    """x, and the tensors that are written."""
    import torch

    rows, granularity = case.sizes["T"], case.options["granularity"]
    shape = scale_shape(rows, case.sizes["N"], granularity)
    return {
        "x": _random(rows, columns, case.dtype, case.values, device, seed),
        "q": torch.zeros(rows, case.sizes["N"], device=device).to(torch.float8_e4m3fn),
        "scale": torch.full(shape, 0.05, device=device),
    }


def _norm_make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    made = _made(case, case.sizes["N"], device, seed)
    weight = torch.rand(case.sizes["N"], generator=torch.Generator().manual_seed(seed)) + 0.5
    return made | {
        "weight": None if case.values == "strided" else weight.to(device),
        "granularity": case.options["granularity"],
        "eps": 1e-6,
        "residual": None,
        "normed": None,
    }


def _layer_make(case: Case, device: str, seed: int) -> dict[str, Any]:
    made = _norm_make(case, device, seed)
    weight = made["weight"]
    made |= {"bias": None if weight is None else weight - 1, "eps": 1e-5}
    return {name: made[name] for name in LAYER_NORM_QUANT.names}


def _gated_make(case: Case, device: str, seed: int) -> dict[str, Any]:
    made = _made(case, 2 * case.sizes["N"], device, seed)
    options = {name: case.options[name] for name in ("activation", "granularity")}
    return made | options


def _fused(spec: Spec, **more: Any) -> Contract:
    """A backend returns new codes and scales, which the operator copies into those given."""
    # A code next to it, and float32's sums.
    codes = Tensor("new_q", "T N", "q", rtol=2**-3, atol=2**-9)
    scales = Tensor("new_scale", "*", "scale", rtol=1e-5)
    contract = Contract.of(
        "quant",
        spec.changed(
            results=(codes, scales),
            arguments=tuple(
                replace(each, written=False) if isinstance(each, Tensor) else each
                for each in spec.arguments
            ),
        ),
        mutates=("q", "scale"),
        derive=_fused_sizes,
        **more,
    )
    return replace(
        contract,
        outputs=(
            contract.outputs[0],
            replace(contract.outputs[1], dims=("scale rows", "scale columns")),
        ),
    )


def _fused_sizes(sizes: dict[str, int], values: dict[str, Any]) -> dict[str, int]:
    down, across = scale_shape(*values["q"].shape, values["granularity"])
    return {"scale rows": down, "scale columns": across, "N": values["q"].shape[1]}


_NORM_CASES: dict[str, Any] = {
    "cases": (
        _fused_case(33, 256, "row"),
        _fused_case(20, 4096, "1x128", "float16"),
        _fused_case(17, 200, "1x128"),
        _fused_case(9, 384, "tensor"),
        _fused_case(20, 128, "row", values="strided"),
        _fused_case(5, 36, "row"),
        _fused_case(0, 64, "row"),
    ),
    "timing": {"cpu": _fused_case(64, 1024, "row"), "cuda": _fused_case(4096, 4096, "row")},
}
_RMS_NORM_QUANT = _fused(RMS_NORM_QUANT, make=_norm_make, **_NORM_CASES)
_LAYER_NORM_QUANT = _fused(LAYER_NORM_QUANT, make=_layer_make, **_NORM_CASES)
_ACT_AND_MUL_QUANT = _fused(
    ACT_AND_MUL_QUANT,
    cases=(
        _fused_case(33, 256, "row", activation="silu"),
        _fused_case(20, 4096, "1x128", "float16", activation="gelu"),
        _fused_case(17, 200, "1x128", activation="gelu_tanh"),
        _fused_case(9, 384, "tensor", activation="relu"),
        _fused_case(20, 128, "row", values="strided", activation="silu"),
        _fused_case(5, 36, "row", activation="silu"),
        _fused_case(0, 64, "row", activation="silu"),
    ),
    timing={
        "cpu": _fused_case(64, 1024, "row", activation="silu"),
        "cuda": _fused_case(4096, 4096, "1x128", activation="silu"),
    },
    make=_gated_make,
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


_CASES = (
    _nvfp4_case(1, 16),
    _nvfp4_case(33, 272),
    _nvfp4_case(64, 1024, "float16"),
    _nvfp4_case(20, 128, "float32", "global scale"),
    _nvfp4_case(0, 64),
)

_NVFP4_TIMING = {"cpu": _nvfp4_case(256, 1024), "cuda": _nvfp4_case(8192, 4096)}

CONTRACTS = (
    _FP8,
    _FP8_TRANSPOSE,
    _RMS_NORM_QUANT,
    _LAYER_NORM_QUANT,
    _ACT_AND_MUL_QUANT,
    Contract.of(
        "quant",
        NVFP4_DEQUANTIZE,
        cases=_CASES,
        timing=_NVFP4_TIMING,
        make=_dequantize_make,
        derive=lambda sizes, values: {"K": 2 * sizes["K / 2"]},
    ),
    Contract.of(
        "quant",
        NVFP4_QUANTIZE,
        cases=(
            *_CASES,
            _nvfp4_case(20, 128, "bfloat16", "strided"),
            _nvfp4_case(20, 128, "float32", "special"),
        ),
        timing=_NVFP4_TIMING,
        make=_quantize_make,
        derive=lambda sizes, values: {"K / 2": sizes["K"] // 2, "K / 16": sizes["K"] // 16},
    ),
)

# Names in tiercel.plugins.types.
ALIASES = {
    "Fp8Codes": "fp8_quantize.q",
    "Fp4Codes": "nvfp4_quantize.q",
    "Fp4Scales": "nvfp4_quantize.scale",
}
