# SPDX-License-Identifier: Apache-2.0
"""Smoke cases of products with 4-bit matrices, and the contracts of their plug-ins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiercel.ops.gemv.spec import NVFP4_GEMV, NVFP4_LINEAR, W4_LINEAR
from tiercel.plugins.contract import Case, Contract, TensorSpec


def _draw(seed: int) -> Any:
    """Functions that draw codes and scales, on the CPU: the same numbers on every device."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def codes(*shape: int) -> Any:
        drawn = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return drawn.view(torch.float4_e2m1fn_x2)

    def scales(*shape: int) -> Any:
        return (torch.rand(*shape, generator=generator) + 0.05).to(torch.float8_e4m3fn)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    return codes, scales, normal


# --------------------------------------------------------------------------------------- gemv


def _gemv_case(m: int, k: int, batches: int) -> Case:
    return Case({"m": m, "k": k, "l": batches}, "float16")


def _gemv_make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    from tiercel.ops.gemv.reference import permute_scales

    m, k, batches = (case.sizes[name] for name in "mkl")
    codes, scales, _ = _draw(seed)
    # In memory batches are outermost and k is innermost.
    a, b = codes(batches, m, k // 2), codes(batches, 1, k // 2)
    scale_a = scales(batches, m, k // 16).permute(1, 2, 0)
    scale_b = scales(batches, 1, k // 16).permute(1, 2, 0)
    c = torch.zeros(batches, m, 1, dtype=torch.float16, device=device)
    return {
        "a": a.to(device).permute(1, 2, 0),
        "b": b.to(device).permute(1, 2, 0),
        "scale_a": scale_a,
        "scale_b": scale_b,
        "scale_a_permuted": permute_scales(scale_a.to(device)),
        "scale_b_permuted": permute_scales(scale_b.to(device)),
        "c": c.permute(1, 2, 0),
    }


_PERMUTED = ("32", "4", "m / 128", "4", "k / 64", "l")


def _permuted(name: str, rows: str) -> TensorSpec:
    dims = tuple(dim.replace("m / 128", rows) for dim in _PERMUTED)
    return TensorSpec(name, dims, ("float8_e4m3fn",), strided=True)


_GEMV = replace(
    Contract.of(
        "gemv",
        NVFP4_GEMV,
        replaced={
            "scale_a_permuted": _permuted("scale_a_permuted", "m / 128"),
            "scale_b_permuted": _permuted("scale_b_permuted", "1"),
        },
        cases=(
            _gemv_case(1, 64, 1),
            _gemv_case(33, 96, 1),
            _gemv_case(128, 256, 2),
            _gemv_case(200, 1056, 3),
            _gemv_case(512, 2048, 1),
            _gemv_case(0, 64, 1),
        ),
        timing={"cpu": _gemv_case(128, 512, 1), "cuda": _gemv_case(7168, 16384, 1)},
        make=_gemv_make,
    ),
    mutates=(),
    # One rounding to float16, and float32 sums of what may cancel.
    outputs=(TensorSpec("c", ("m", "1", "l"), ("float16",), rtol=1e-3, atol=2e-2),),
)


# ------------------------------------------------------------------------------------- linear


def _linear_case(tokens: int, features: int, k: int, values: str = "random") -> Case:
    return Case({"T": tokens, "N": features, "K": k}, "bfloat16", {}, values)


def _linear_make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    tokens, features, k = (case.sizes[name] for name in "TNK")
    codes, scales, normal = _draw(seed)
    scaled, strided = case.values == "global scale", case.values == "strided"
    return {
        "x": (normal(tokens, 2 * k)[:, :k] if strided else normal(tokens, k)).to(device),
        "weight": codes(features, k // 2).to(device),
        "scale": scales(features, k // 16).to(device),
        "global_scale": torch.full((1,), 0.3, device=device) if scaled else None,
    }


def _w4_case(tokens: int, features: int, k: int, kind: str, values: str = "random") -> Case:
    activation = "silu" if values == "bias" else "none"
    options = {"format": kind, "activation": activation}
    dtype = "float16" if values == "float16" else "bfloat16"
    return Case({"T": tokens, "N": features, "K": k}, dtype, options, values)


def _w4_make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    tokens, features, k = (case.sizes[name] for name in "TNK")
    generator = torch.Generator().manual_seed(seed)
    dtype, kind = getattr(torch, case.dtype), case.options["format"]

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(dtype)

    group = {"nvfp4": 16, "mxfp4": 32, "int4": 128 if k % 128 == 0 else 64}[kind]
    shape = features, k // group
    zeros = None
    if kind == "mxfp4":
        scale = torch.randint(121, 129, shape, dtype=torch.uint8, generator=generator)
    elif kind == "nvfp4":
        scale = (torch.rand(shape, generator=generator) + 0.05).to(torch.float8_e4m3fn)
    else:
        scale = (torch.rand(shape, generator=generator) / 4 + 0.05).to(dtype)
        if case.values == "zero points":
            zeros = torch.randint(0, 16, shape, generator=generator).to(dtype).to(device)
    codes = torch.randint(0, 256, (features, k // 2), dtype=torch.uint8, generator=generator)
    strided, with_bias = case.values == "strided", case.values == "bias"
    return {
        "x": (normal(tokens, 2 * k)[:, :k] if strided else normal(tokens, k)).to(device),
        "weight": codes.to(device),
        "scale": scale.to(device),
        "format": kind,
        "zero_point": zeros,
        "global_scale": torch.full((1,), 0.3, device=device) if with_bias else None,
        "bias": normal(features).to(device) if with_bias else None,
        "activation": case.options["activation"],
    }


def _w4_sums(values: dict[str, Any]) -> Any:
    """The sums of the terms' magnitudes."""
    from tiercel.ops.gemv.reference import w4_values

    weights = w4_values(values["weight"], values["scale"], values["format"], values["zero_point"])
    sums = values["x"].float().abs() @ weights.abs().mT
    if values["global_scale"] is not None:
        sums = sums * values["global_scale"]
    return sums if values["bias"] is None else sums + values["bias"].float().abs()


CONTRACTS = (
    _GEMV,
    Contract.of(
        "gemv",
        NVFP4_LINEAR,
        cases=(
            _linear_case(1, 64, 64),
            _linear_case(7, 100, 192),
            _linear_case(8, 256, 512, "global scale"),
            _linear_case(16, 128, 1024),
            _linear_case(17, 64, 128),
            _linear_case(5, 64, 128, "strided"),
            _linear_case(0, 64, 64),
        ),
        timing={"cpu": _linear_case(4, 256, 256), "cuda": _linear_case(4, 7168, 16384)},
        make=_linear_make,
    ),
    Contract.of(
        "gemv",
        W4_LINEAR.without("x_scale"),
        cases=(
            _w4_case(1, 64, 64, "mxfp4"),
            _w4_case(7, 100, 192, "int4", "zero points"),
            _w4_case(16, 136, 256, "nvfp4", "bias"),
            _w4_case(33, 72, 320, "mxfp4", "bias"),
            _w4_case(130, 264, 512, "int4"),
            _w4_case(5, 64, 128, "int4", "strided"),
            _w4_case(40, 128, 128, "nvfp4", "float16"),
            _w4_case(0, 64, 64, "mxfp4"),
        ),
        timing={
            "cpu": _w4_case(4, 256, 256, "mxfp4"),
            "cuda": _w4_case(64, 7168, 16384, "mxfp4"),
        },
        make=_w4_make,
        sums=_w4_sums,
    ),
)

# Names in tiercel.plugins.types.
ALIASES = {
    "Fp4Matrix": "nvfp4_gemv.a",
    "Fp4Vector": "nvfp4_gemv.b",
    "RawScales": "nvfp4_gemv.scale_a",
    "PermutedScales": "nvfp4_gemv.scale_a_permuted",
    "ProductColumn": "nvfp4_gemv.c",
    "Fp4Weight": "nvfp4_linear.weight",
}
