# SPDX-License-Identifier: Apache-2.0
"""To 8-bit floats where values are made: norms and gated activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.ops.quant.cases import _distance
from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

GRANULARITIES = ("tensor", "row", "1x128")


def _invalid(params: Mapping[str, Any]) -> str | None:
    if params["scales"] not in GRANULARITIES:
        return f"`scales` must be one of {', '.join(GRANULARITIES)}"
    if not all(isinstance(params[name], int) and params[name] > 0 for name in "TN"):
        return "T and N must be positive whole numbers"
    return None


def _results(case: Any, device: Any) -> Inputs:
    """q, and scales, of which that of a tensor is given."""
    import torch

    from tiercel.ops.quant.spec import scale_shape

    shape = (case["T"], case["N"])
    # Products of two normal values reach 30; e4m3 ends at 448.
    scale = torch.full(scale_shape(*shape, case["scales"]), 0.1, device=device)
    return {"q": torch.empty(shape, dtype=torch.float8_e4m3fn, device=device), "scale": scale}


def _random(case: Any, columns: int, device: str, seed: int) -> Any:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(case["T"], columns, device=device, generator=generator)
    return x.to(getattr(torch, case.dtype))


def _make_norm(case: Any, device: str, seed: int) -> Inputs:
    x = _random(case, case["N"], device, seed)
    residual = _random(case, case["N"], device, seed + 1) if case["residual"] else None
    weight = _random(case, case["N"], device, seed + 2)[0].contiguous() * 0.1 + 1
    return {"x": x, **_results(case, device), "weight": weight, "residual": residual}


def _call_norm(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = ("x", "q", "scale", "weight")
    options = {"granularity": case["scales"], "residual": inputs["residual"]}
    return tuple(inputs[name] for name in names), options


def _make_layer_norm(case: Any, device: str, seed: int) -> Inputs:
    inputs = _make_norm(case, device, seed)
    bias = _random(case, case["N"], device, seed + 3)[0].contiguous() * 0.1
    residual = inputs.pop("residual")
    return inputs | {"bias": bias, "residual": residual}


def _call_layer_norm(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    arguments, options = _call_norm(case, inputs)
    return (*arguments, inputs["bias"]), options


def _make_activation(case: Any, device: str, seed: int) -> Inputs:
    return {"x": _random(case, 2 * case["N"], device, seed), **_results(case, device)}


def _call_activation(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (inputs["x"], inputs["q"], inputs["scale"]), {"granularity": case["scales"]}


def _scale_bytes(case: Any) -> int:
    from tiercel.ops.quant.spec import scale_shape

    down, across = scale_shape(case["T"], case["N"], case["scales"])
    return 4 * down * across


def _bytes_norm(case: Any) -> int:
    """x, with a residual that too, read and written; q; scales; and weights."""
    elements = int(case["T"] * case["N"])
    moved = 3 if case["residual"] else 1
    return elements * (2 * moved + 1) + _scale_bytes(case) + 2 * int(case["N"])


def _bytes_layer_norm(case: Any) -> int:
    return _bytes_norm(case) + 2 * int(case["N"])


def _bytes_activation(case: Any) -> int:
    return int(case["T"] * case["N"]) * 5 + _scale_bytes(case)


def _normed(case: Any, inputs: Inputs) -> Any:
    wide = inputs["x"].double()
    if inputs["residual"] is not None:  # repeated calls add x again and again
        return None
    factor = (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    return wide * factor * inputs["weight"].double()


def _layer_normed(case: Any, inputs: Inputs) -> Any:
    wide = inputs["x"].double()
    if inputs["residual"] is not None:  # repeated calls add x again and again
        return None
    wide = wide - wide.mean(1, keepdim=True)
    factor = (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    return wide * factor * inputs["weight"].double() + inputs["bias"].double()


def _activated(case: Any, inputs: Inputs) -> Any:
    import torch

    gate, factor = inputs["x"].double().chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * factor


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """The bounds are those of fp8_quantize. Others may round to 16 bits on the way, which moves a
    value to its neighbour."""
    q, scale = outputs
    if q.shape != inputs["q"].shape:
        raise WrongResult(f"shape {tuple(q.shape)}")
    if expected is None:
        return Error(rms=0.0, maximum=0.0)
    across = -(-q.shape[1] // scale.shape[1])
    spread = scale.double().repeat_interleave(across, 1)[:, : q.shape[1]].expand(q.shape)
    slack = 1.05 if launch.strict else 2.1
    return _distance(q.double() * spread, expected, 2.0**-4 * slack, spread * 2.0**-10 * slack)


BENCHES = [
    OpBench(
        family="quant",
        op="rms_norm_quant",
        params={"T": None, "N": None, "scales": "row", "residual": False},
        invalid=_invalid,
        make=_make_norm,
        call=_call_norm,
        out=lambda case, inputs: None,
        bytes_moved=_bytes_norm,
        reference=_normed,
        check=_check,
    ),
    OpBench(
        family="quant",
        op="layer_norm_quant",
        params={"T": None, "N": None, "scales": "row", "residual": False},
        invalid=_invalid,
        make=_make_layer_norm,
        call=_call_layer_norm,
        out=lambda case, inputs: None,
        bytes_moved=_bytes_layer_norm,
        reference=_layer_normed,
        check=_check,
    ),
    OpBench(
        family="quant",
        op="act_and_mul_quant",
        params={"T": None, "N": None, "scales": "row"},
        invalid=_invalid,
        make=_make_activation,
        call=_call_activation,
        out=lambda case, inputs: None,
        bytes_moved=_bytes_activation,
        reference=_activated,
        check=_check,
    ),
]
