# SPDX-License-Identifier: Apache-2.0
"""To 8-bit and 4-bit floats and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
_L2_BYTES = 50e6  # what of a tensor can be read again without DRAM, at most
# Rows and columns that share a scale; 0: all.
TILES = {
    "tensor": (0, 0),
    "static": (0, 0),
    "row": (1, 0),
    "1x128": (1, 128),
    "128x128": (128, 128),
}


def _sizes(params: Mapping[str, Any]) -> str | None:
    if not all(isinstance(params[name], int) and params[name] > 0 for name in "TK"):
        return "T and K must be positive whole numbers"
    return None


def _invalid(params: Mapping[str, Any]) -> str | None:
    if params["scales"] not in TILES:
        return f"`scales` must be one of {', '.join(TILES)}"
    return _sizes(params)


def _invalid_nvfp4(params: Mapping[str, Any]) -> str | None:
    return _sizes(params) or ("K must be a multiple of 16" if params["K"] % 16 else None)


def _random(case: Any, device: str, seed: int) -> Any:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(case["T"], case["K"], device=device, generator=generator)
    return x.to(getattr(torch, case.dtype))


def _make(case: Any, device: str, seed: int) -> Inputs:
    x = _random(case, device, seed)
    scale = (x.abs().amax().float() / 448.0).view(1, 1)
    return {"x": x, "scale": scale, "granularity": _granularity(case)}


def _granularity(case: Any) -> str:
    return "tensor" if case["scales"] == "static" else str(case["scales"])


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = {"scale": inputs["scale"]} if case["scales"] == "static" else {}
    return (inputs["x"], inputs["granularity"]), options


def fp8_out(case: Any, inputs: Inputs) -> tuple[Any, Any]:
    import torch

    x = inputs["x"]
    rows, columns = TILES[case["scales"]]
    shape = (-(-case["T"] // rows) if rows else 1, -(-case["K"] // columns) if columns else 1)
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    if case["scales"] == "static":
        return q, inputs["scale"]
    return q, torch.empty(shape, dtype=torch.float32, device=x.device)


def _bytes(case: Any) -> int:
    values = case["T"] * case["K"]
    rows, columns = TILES[case["scales"]]
    scales = (-(-case["T"] // rows) if rows else 1) * (-(-case["K"] // columns) if columns else 1)
    read = values * _ELEMENT[case.dtype]
    if case["scales"] == "tensor":
        # The scale is known when all is read; what the L2 does not hold is read again.
        read += max(read - int(_L2_BYTES), 0)
    return int(read + values + 4 * scales)


def _reference(case: Any, inputs: Inputs) -> dict[str, Any]:
    from tiercel.ops.quant import reference as ref

    given = inputs["scale"] if case["scales"] == "static" else None
    q, scale = ref.fp8_quantize(inputs["x"], inputs["granularity"], scale=given)
    return {"q": q, "scale": scale, "tile": ref.tile_of(inputs["x"], inputs["granularity"])}


def _compare_bits(launch: Launch, pairs: Any) -> None:
    """Ours has to give the reference's bits."""
    import torch

    if not launch.strict:
        return
    for name, got, due in pairs:
        same = got.contiguous().view(torch.uint8) == due.contiguous().view(torch.uint8)
        if not bool(same.all()):
            raise WrongResult(f"{int((~same).sum())} bytes of {name} are not the reference's")


def _distance(values: Any, x: Any, relative: float, absolute: Any) -> Error:
    """The distance of the dequantised values from x."""
    import torch

    wide = x.double()
    errors = (values - wide).abs_()
    if not bool(torch.isfinite(errors).all()):
        raise WrongResult("a result is not finite")
    if bool((errors > wide.abs() * relative + absolute).any()):
        raise WrongResult(f"a value is off by {float(errors.max()):.1e}")
    rms = float(errors.square().mean().sqrt() / wide.square().mean().sqrt())
    return Error(rms=rms, maximum=float(errors.max() / wide.abs().max()))


def _check(inputs: Inputs, expected: dict[str, Any], outputs: Any, launch: Launch) -> Error:
    """Half a unit of e4m3's three bits, 2**-4 of a value, and half of its smallest one, 2**-10."""
    q, scale = outputs
    x = inputs["x"]
    if q.shape != x.shape:
        raise WrongResult(f"shape {tuple(q.shape)}")
    _compare_bits(launch, [("q", q, expected["q"]), ("scale", scale, expected["scale"])])
    rows, columns = expected["tile"]
    scales = scale.double().reshape(expected["scale"].shape)
    spread = scales.repeat_interleave(rows, 0)[: x.shape[0]]
    spread = spread.repeat_interleave(columns, 1)[:, : x.shape[1]]
    return _distance(q.double() * spread, x, 2.0**-4 * 1.01, spread * 2.0**-10 * 1.01)


def _invalid_transpose(params: Mapping[str, Any]) -> str | None:
    if params["scales"] not in ("1x128", "128x128"):
        return "`scales` must be 1x128 or 128x128"
    return _sizes(params)


def _transpose_bytes(case: Any) -> int:
    """Each value is read once and written twice."""
    down, across = (-(-case[name] // 128) for name in "TK")
    scales = 2 * down * across
    if case["scales"] == "1x128":
        scales = case["T"] * across + case["K"] * down
    written = case["T"] * case["K"] + case["K"] * down * 128
    return int(case["T"] * case["K"] * _ELEMENT[case.dtype] + written + 4 * scales)


def _transpose_reference(case: Any, inputs: Inputs) -> dict[str, Any]:
    from tiercel.ops.quant import reference as ref

    results = ref.fp8_quantize_transpose(inputs["x"], case["scales"])
    named = zip(("q", "scale", "q_t", "scale_t"), results, strict=True)
    return {**dict(named), "tile": ref.tile_of(inputs["x"], case["scales"])}


def _check_transpose(
    inputs: Inputs, expected: dict[str, Any], outputs: Any, launch: Launch
) -> Error:
    q, scale, q_t, scale_t = outputs
    pairs = [("q_t", q_t, expected["q_t"]), ("scale_t", scale_t, expected["scale_t"])]
    _compare_bits(launch, pairs)
    return _check(inputs, expected, (q, scale), launch)


# ------------------------------------------------------------------------------------- nvfp4


def _make_nvfp4(case: Any, device: str, seed: int) -> Inputs:
    x = _random(case, device, seed)
    largest = x.abs().amax().float().view(1) / (448.0 * 6.0)
    return {"x": x, "global_scale": largest if case["global_scale"] else None}


def _make_narrow(case: Any, device: str, seed: int) -> Inputs:
    from tiercel.ops.quant import reference as ref

    inputs = _make_nvfp4(case, device, seed)
    q, scale = ref.nvfp4_quantize(inputs["x"], global_scale=inputs["global_scale"])
    return {**inputs, "q": q, "scale": scale}


def _quantize_out(case: Any, inputs: Inputs) -> tuple[Any, Any]:
    import torch

    rows, columns, device = case["T"], case["K"], inputs["x"].device
    return (
        torch.empty(rows, columns // 2, dtype=torch.float4_e2m1fn_x2, device=device),
        torch.empty(rows, columns // 16, dtype=torch.float8_e4m3fn, device=device),
    )


def _nvfp4_bytes(case: Any) -> int:
    values = case["T"] * case["K"]
    return int(values * _ELEMENT[case.dtype] + values // 2 + values // 16)


def _nvfp4_reference(case: Any, inputs: Inputs) -> dict[str, Any]:
    from tiercel.ops.quant import reference as ref

    q, scale = ref.nvfp4_quantize(inputs["x"], global_scale=inputs["global_scale"])
    return {"q": q, "scale": scale}


def _check_quantized(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """Half of e2m1's largest step, 2, times the scale; a scale is off by 2**-4 at most."""
    import torch

    from tiercel.ops.quant import reference as ref

    q, scale = outputs
    _compare_bits(launch, [("q", q, expected["q"]), ("scale", scale, expected["scale"])])
    total = inputs["global_scale"]
    wide = ref.nvfp4_dequantize(q, scale, global_scale=total, dtype=torch.float32).double()
    step = scale.double().repeat_interleave(16, 1) * (1.0 if total is None else total.double())
    return _distance(wide, inputs["x"], 2.0**-4, step * 1.1)


def _dequantized(case: Any, inputs: Inputs) -> Any:
    from tiercel.ops.quant import reference as ref

    return ref.nvfp4_dequantize(
        inputs["q"],
        inputs["scale"],
        global_scale=inputs["global_scale"],
        dtype=inputs["x"].dtype,
    )


def _check_dequantized(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    (result,) = outputs
    _compare_bits(launch, [("out", result, expected)])
    return _distance(result.double(), expected, 2.0**-7, 0.0)


BENCHES = [
    OpBench(
        family="quant",
        op="fp8_quantize",
        params={"T": None, "K": None, "scales": "row"},
        invalid=_invalid,
        make=_make,
        call=_call,
        out=fp8_out,
        bytes_moved=_bytes,
        reference=_reference,
        check=_check,
    ),
    OpBench(
        family="quant",
        op="fp8_quantize_transpose",
        params={"T": None, "K": None, "scales": "1x128"},
        invalid=_invalid_transpose,
        make=_make,
        call=lambda case, inputs: ((inputs["x"], case["scales"]), {}),
        out=lambda case, inputs: None,
        bytes_moved=_transpose_bytes,
        reference=_transpose_reference,
        check=_check_transpose,
    ),
    OpBench(
        family="quant",
        op="nvfp4_quantize",
        params={"T": None, "K": None, "global_scale": False},
        invalid=_invalid_nvfp4,
        make=_make_nvfp4,
        call=lambda case, inputs: ((inputs["x"],), {"global_scale": inputs["global_scale"]}),
        out=_quantize_out,
        bytes_moved=_nvfp4_bytes,
        reference=_nvfp4_reference,
        check=_check_quantized,
    ),
    OpBench(
        family="quant",
        op="nvfp4_dequantize",
        params={"T": None, "K": None, "global_scale": False},
        invalid=_invalid_nvfp4,
        make=_make_narrow,
        call=lambda case, inputs: (
            (inputs["q"], inputs["scale"]),
            {"global_scale": inputs["global_scale"], "dtype": inputs["x"].dtype},
        ),
        out=lambda case, inputs: inputs["x"].new_empty(inputs["x"].shape),
        bytes_moved=_nvfp4_bytes,
        reference=_dequantized,
        check=_check_dequantized,
    ),
]
