# SPDX-License-Identifier: Apache-2.0
"""Matrices of 4-bit floats times few vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench


def _invalid(names: str, group: int) -> Any:
    def invalid(params: Mapping[str, Any]) -> str | None:
        if not all(isinstance(params[name], int) and params[name] > 0 for name in names):
            return f"{', '.join(names)} must be positive whole numbers"
        return f"K must be a multiple of {group}" if params["K"] % group else None

    return invalid


def _random_bytes(generator: Any, *shape: int) -> Any:
    import torch

    options = {"dtype": torch.uint8, "device": generator.device, "generator": generator}
    return torch.randint(0, 256, shape, **options).view(torch.float4_e2m1fn_x2)


def _random_scales(generator: Any, *shape: int) -> Any:
    import torch

    drawn = torch.rand(shape, device=generator.device, generator=generator)
    return (drawn + 0.1).to(torch.float8_e4m3fn)


def values_of(q: Any, scale: Any, dtype: Any) -> Any:
    """The values of [..., K / 2] codes and [..., K / 16] scales."""
    from tiercel.ops.quant.reference import nvfp4_values

    values = nvfp4_values(q).unflatten(-1, (scale.shape[-1], 16))
    return (values * scale.float()[..., None]).flatten(-2).to(dtype)


def _weighted(case: Any) -> int:
    """Bytes of a matrix of 4-bit floats with its scales, a value of K."""
    return int(case["K"] // 2 + case["K"] // 16)


# --------------------------------------------------------------------------------------- gemv


def _make_gemv(case: Any, device: str, seed: int) -> Inputs:
    import torch

    from tiercel.ops.gemv.reference import permute_scales

    generator = torch.Generator(device=device).manual_seed(seed)
    rows, k, batches = case["M"], case["K"], case["L"]
    # Batches outermost in memory, values of K innermost.
    a = _random_bytes(generator, batches, rows, k // 2).permute(1, 2, 0)
    b = _random_bytes(generator, batches, 1, k // 2).permute(1, 2, 0)
    scale_a = _random_scales(generator, batches, rows, k // 16).permute(1, 2, 0)
    scale_b = _random_scales(generator, batches, 1, k // 16).permute(1, 2, 0)
    return {
        "a": a,
        "b": b,
        "scale_a": scale_a.cpu(),
        "scale_b": scale_b.cpu(),
        "scale_a_permuted": permute_scales(scale_a),
        "scale_b_permuted": permute_scales(scale_b),
    }


def _column(case: Any, inputs: Inputs) -> Any:
    import torch

    shape, device = (case["L"], case["M"], 1), inputs["a"].device
    return torch.empty(shape, dtype=torch.float16, device=device).permute(1, 2, 0)


def _gemv_bytes(case: Any) -> int:
    return int((case["M"] + 1) * case["L"] * _weighted(case) + 2 * case["M"] * case["L"])


def _gemv_reference(case: Any, inputs: Inputs) -> Any:
    import torch

    scale = inputs["scale_a"].to(inputs["a"].device)
    scale_b = inputs["scale_b"].to(inputs["a"].device)
    batches = []
    for i in range(case["L"]):
        vector = values_of(inputs["b"][..., i], scale_b[..., i], torch.float64)[0]
        parts = [
            values_of(a, s, torch.float64) @ vector
            for a, s in zip(inputs["a"][..., i].split(2048), scale[..., i].split(2048), strict=True)
        ]
        batches.append(torch.cat(parts))
    return torch.stack(batches, dim=-1)[:, None]


def _check_product(result: Any, expected: Any, roundings: float) -> Error:
    """`roundings` to the result's dtype of what is due, and what sums lose."""
    import torch

    unit = torch.finfo(result.dtype).eps / 2
    errors = (result.double() - expected).abs()
    scale = expected.square().mean().sqrt()
    if not bool(torch.isfinite(errors).all()):
        raise WrongResult("a result is not finite")
    worst = float((errors / (roundings * unit * (expected.abs() + scale) + 1e-5 * scale)).max())
    if worst > 1:
        raise WrongResult(f"a result is off by {worst:.1f} times its tolerance")
    rms = float(errors.square().mean().sqrt() / scale)
    return Error(rms=rms, maximum=float(errors.max() / expected.abs().max()))


def _check_gemv(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """Others multiply bfloat16 by bfloat16, which holds the values exactly, and may round to it."""
    (result,) = outputs
    if result.shape != expected.shape:
        raise WrongResult(f"shape {tuple(result.shape)}")
    return _check_product(result, expected, 1.05 if launch.strict else 4.0)


# ------------------------------------------------------------------------------------- linear


def _make_linear(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(case["T"], case["K"], device=device, generator=generator)
    return {
        "x": x.to(torch.bfloat16),
        "weight": _random_bytes(generator, case["N"], case["K"] // 2),
        "scale": _random_scales(generator, case["N"], case["K"] // 16),
    }


def _linear_bytes(case: Any) -> int:
    return int(case["N"] * _weighted(case) + 2 * case["T"] * (case["K"] + case["N"]))


def _linear_reference(case: Any, inputs: Inputs) -> Any:
    import torch

    parts = [
        inputs["x"].double() @ values_of(w, s, torch.float64).T
        for w, s in zip(inputs["weight"].split(2048), inputs["scale"].split(2048), strict=True)
    ]
    return torch.cat(parts, dim=1)


def _check_linear(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """Others may round partial sums too."""
    (result,) = outputs
    if result.shape != expected.shape:
        raise WrongResult(f"shape {tuple(result.shape)}")
    return _check_product(result, expected, 1.05 if launch.strict else 4.0)


# ----------------------------------------------------------------------------------------- w4

_GROUPS = {"nvfp4": 16, "mxfp4": 32, "int4": 128}


def _invalid_w4(params: Mapping[str, Any]) -> str | None:
    if params["format"] not in _GROUPS:
        return f"format must be one of {', '.join(_GROUPS)}"
    if params["float8"] and params["format"] == "nvfp4":
        return "float8 activations do not go with nvfp4"
    return _invalid("TNK", 128 if params["format"] == "int4" else 64)(params)  # type: ignore[no-any-return]


def _make_w4(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    n, k, kind = case["N"], case["K"], case["format"]
    shape = n, k // _GROUPS[kind]
    options = {"device": device, "generator": generator}
    if kind == "nvfp4":
        scale = _random_scales(generator, *shape)
    elif kind == "mxfp4":
        scale = torch.randint(121, 129, shape, dtype=torch.uint8, **options)
    else:
        scale = (torch.rand(shape, **options) / 4 + 0.05).to(torch.bfloat16)
    x = torch.randn(case["T"], k, **options)
    inputs = {
        "x": x.to(torch.bfloat16),
        "weight": torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, **options),
        "scale": scale,
    }
    if case["float8"]:
        inputs["x_scale"] = x.abs().amax(-1, keepdim=True) / 448
        inputs["x"] = (x / inputs["x_scale"]).to(torch.float8_e4m3fn)
    return inputs


def _w4_call(case: Any, inputs: Inputs) -> Any:
    operands = tuple(inputs[name] for name in ("x", "weight", "scale"))
    options = {"format": case["format"]}
    return operands, options | ({"x_scale": inputs["x_scale"]} if case["float8"] else {})


def _w4_out(case: Any, inputs: Inputs) -> Any:
    import torch

    return inputs["x"].new_empty(case["T"], case["N"], dtype=torch.bfloat16)


def _w4_bytes(case: Any) -> int:
    group = _GROUPS[case["format"]]
    scales = case["K"] // group * (2 if case["format"] == "int4" else 1)
    x_row = case["K"] + 4 if case["float8"] else 2 * case["K"]
    return int(case["N"] * (case["K"] // 2 + scales) + case["T"] * (x_row + 2 * case["N"]))


def _w4_reference(case: Any, inputs: Inputs) -> Any:
    import torch

    from tiercel.ops.gemv.reference import w4_values

    x = inputs["x"].double()
    if case["float8"]:
        x = x * inputs["x_scale"].double()
    parts = [
        x @ w4_values(w, s, case["format"]).double().T
        for w, s in zip(inputs["weight"].split(2048), inputs["scale"].split(2048), strict=True)
    ]
    return torch.cat(parts, dim=1)


def _check_w4(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """Weights of int4 are rounded to bfloat16, each once; others may round partial sums too. Tensor
    cores that sum float8 lose as much as one more rounding."""
    (result,) = outputs
    if result.shape != expected.shape:
        raise WrongResult(f"shape {tuple(result.shape)}")
    of_ours = 3.0 if "x_scale" in inputs else 2.0
    return _check_product(result, expected, of_ours if launch.strict else 4.0)


BENCHES = [
    OpBench(
        family="gemv",
        op="w4_linear",
        params={"T": None, "N": None, "K": None, "format": "mxfp4", "float8": False},
        invalid=_invalid_w4,
        make=_make_w4,
        call=_w4_call,
        out=_w4_out,
        bytes_moved=_w4_bytes,
        flops=lambda case: 2 * int(case["T"] * case["N"] * case["K"]),
        reference=_w4_reference,
        check=_check_w4,
    ),
    OpBench(
        family="gemv",
        op="nvfp4_gemv",
        params={"M": None, "K": None, "L": 1},
        invalid=_invalid("MKL", 64),
        make=_make_gemv,
        call=lambda case, inputs: ((*inputs.values(), _column(case, inputs)), {}),
        out=lambda case, inputs: None,
        bytes_moved=_gemv_bytes,
        flops=lambda case: 2 * int(case["M"] * case["K"] * case["L"]),
        reference=_gemv_reference,
        check=_check_gemv,
    ),
    OpBench(
        family="gemv",
        op="nvfp4_linear",
        params={"T": None, "N": None, "K": None},
        invalid=_invalid("TNK", 64),
        make=_make_linear,
        call=lambda case, inputs: (tuple(inputs.values()), {}),
        out=lambda case, inputs: inputs["x"].new_empty(case["T"], case["N"]),
        bytes_moved=_linear_bytes,
        flops=lambda case: 2 * int(case["T"] * case["N"] * case["K"]),
        reference=_linear_reference,
        check=_check_linear,
    ),
]
