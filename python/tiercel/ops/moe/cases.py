# SPDX-License-Identifier: Apache-2.0
"""Experts' MLPs: fused_moe and its halves."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench, judged

_ELEMENT = 2  # bytes; both dtypes have 16 bits
# The dtype of x, or float8 with a scale a row or a block of 128x128.
_WEIGHTS = ("same", "float8", "float8_blocks")
_PARAMS = {"T": None, "E": None, "k": None, "H": None, "I": None}


def invalid(params: Mapping[str, Any]) -> str | None:
    from tiercel.ops.moe.spec import ACTIVATIONS

    sizes = [params[name] for name in (*_PARAMS, *(["bs"] if "bs" in params else []))]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return "sizes must be positive whole numbers"
    if params["k"] > params["E"]:
        return "k must not exceed E"
    if params.get("act", "silu") not in ACTIVATIONS:
        return f"`act` must be one of {', '.join(ACTIVATIONS)}"
    if params.get("weights", "same") not in _WEIGHTS:
        return f"`weights` must be one of {', '.join(_WEIGHTS)}"
    if params.get("weights") == "float8_blocks" and (params["H"] % 128 or params["I"] % 128):
        return "float8_blocks needs H and I that are multiples of 128"
    return None


def _ids(case: Any, device: str, seed: int) -> Any:
    """Routing as even as a good router's: each token's experts by random scores."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    scores = torch.rand(case["T"], case["E"], device=device, generator=generator)
    return scores.topk(case["k"]).indices.int()


def active(case: Any) -> float:
    """Experts that the inputs of the first seed reach, on average over routers."""
    experts, tokens, k = case["E"], case["T"], case["k"]
    return float(experts * (1 - (1 - k / experts) ** tokens))


def make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def random(*shape: int, scale: float = 1.0) -> Any:
        out = torch.empty(shape, device=device, dtype=dtype)
        for part in out if len(shape) == 3 else [out]:  # in float32, one expert at a time
            part.copy_(torch.randn(part.shape, device=device, generator=generator) * scale)
        return out

    hidden, inner = case["H"], case["I"]
    weights = torch.rand(case["T"], case["k"], device=device, generator=generator)
    made = {
        "x": random(case["T"], hidden),
        "w_up": random(case["E"], 2 * inner, hidden, scale=hidden**-0.5),
        "w_down": random(case["E"], hidden, inner, scale=inner**-0.5),
        "topk_weights": weights / weights.sum(dim=1, keepdim=True),
        "topk_ids": _ids(case, device, seed),
    }
    if case.params.get("weights", "same") == "float8":
        for name in ("w_up", "w_down"):
            scale = made[name].abs().amax(dim=2).float() / 448
            narrow = torch.empty_like(made[name], dtype=torch.float8_e4m3fn)
            for expert in range(case["E"]):
                narrow[expert] = (made[name][expert] / scale[expert][:, None]).to(narrow.dtype)
            made[name], made[f"{name}_scale"] = narrow, scale
    if case.params.get("weights", "same") == "float8_blocks":
        for name in ("w_up", "w_down"):
            made[name], made[f"{name}_scale"] = in_blocks(made[name])
    return made


def in_blocks(w: Any) -> tuple[Any, Any]:
    """Sizes are multiples of 128."""
    import torch

    experts, rows, columns = w.shape
    scale = torch.empty(
        (experts, rows // 128, columns // 128), dtype=torch.float32, device=w.device
    )
    narrow = torch.empty_like(w, dtype=torch.float8_e4m3fn)
    for expert in range(experts):
        blocks = w[expert].view(rows // 128, 128, columns // 128, 128).float()
        scale[expert] = blocks.abs().amax(dim=(1, 3)) / 448
        narrow[expert] = (
            (blocks / scale[expert][:, None, :, None]).view(rows, columns).to(narrow.dtype)
        )
    return narrow, scale


def _bytes(case: Any) -> int:
    """The active experts' weights; activations are little beside them."""
    matrices = 3 * case["I"] * case["H"]
    element = _ELEMENT if case["weights"] == "same" else 1
    return int(element * active(case) * matrices + 2 * _ELEMENT * case["T"] * case["H"])


def _flops(case: Any) -> int:
    return 6 * int(case["T"] * case["k"] * case["H"] * case["I"])


def _reference(case: Any, inputs: Inputs) -> Any:
    from tiercel.ops.moe import reference as ref

    wide = [inputs["x"].double(), inputs["w_up"], inputs["w_down"]]
    return ref.fused_moe(
        wide[0],
        Wide(wide[1]),  # type: ignore[arg-type]
        Wide(wide[2]),  # type: ignore[arg-type]
        inputs["topk_weights"].double(),
        inputs["topk_ids"],
        activation=case["act"],
        **_scales(inputs),
    )


def _scales(inputs: Inputs) -> Inputs:
    return {name: value for name, value in inputs.items() if name.endswith("_scale")}


class Wide:
    """Experts' matrices in float64, one at a time: all of them would not fit."""

    def __init__(self, weights: Any) -> None:
        self._weights = weights
        self.shape = weights.shape

    def __getitem__(self, expert: int) -> Any:
        return self._weights[expert].double()


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch | None) -> Error:
    """In units of the dtype's rounding: one between the halves, one of each expert's output, one of
    the sum, of values whose mean square is the result's times k at most."""
    import torch

    (result,) = outputs
    if result.shape != expected.shape or result.dtype != inputs["x"].dtype:
        raise WrongResult(f"shape {tuple(result.shape)}, {result.dtype}")
    unit = torch.finfo(result.dtype).eps / 2
    if _scales(inputs):  # a value between the halves may be rounded to float8's neighbour
        unit *= 8
    scale = expected.square().mean().sqrt()
    tolerance = 1.5 * (unit * (expected.abs() + 6 * scale) + 1e-5 * scale)
    return judged((result.double() - expected).abs(), expected, tolerance, 2 * unit)


_FUSED = OpBench(
    family="moe",
    op="fused_moe",
    params=_PARAMS | {"act": "silu", "weights": "same"},
    invalid=invalid,
    make=make,
    call=lambda case, inputs: (
        tuple(inputs.values())[:5],
        {"activation": case["act"], **_scales(inputs)},
    ),
    out=lambda case, inputs: None,
    bytes_moved=_bytes,
    flops=_flops,
    reference=_reference,
    check=_check,
)


# The halves.


def _route(case: Any, inputs: Inputs) -> Inputs:
    from tiercel.ops.routing.reference import moe_align_block_size

    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    found = moe_align_block_size(inputs["topk_ids"], case["bs"], case["E"])
    return dict(zip(names, found, strict=True))


def _rows(x: Any, case: Any) -> tuple[Any, Inputs]:
    """The arguments of the half: with float8 weights, quantised rows and their scales."""
    from tiercel.ops.quant.reference import fp8_quantize

    if case["weights"] == "same":
        return x, {}
    rows, scale = fp8_quantize(x, "1x128" if case["weights"] == "float8_blocks" else "row")
    return rows, {"x_scale": scale}


def _make_up(case: Any, device: str, seed: int) -> Inputs:
    inputs = make(case, device, seed)
    x, scales = _rows(inputs["x"], case)
    if scales:
        scales["w_up_scale"] = inputs["w_up_scale"]
    return {"x": x, "w_up": inputs["w_up"], **_route(case, inputs), **scales}


def _make_down(case: Any, device: str, seed: int) -> Inputs:
    import torch

    inputs = make(case, device, seed)
    generator = torch.Generator(device=device).manual_seed(seed + 1000)
    x = torch.randn(case["T"] * case["k"], case["I"], device=device, generator=generator)
    x, scales = _rows(x.to(inputs["x"].dtype), case)
    if scales:
        scales["w_down_scale"] = inputs["w_down_scale"]
    weights, routed = inputs["topk_weights"].flatten(), _route(case, inputs)
    return {"x": x, "w_down": inputs["w_down"], "w": weights, **routed, **scales}


def _half_call(case: Any, inputs: Inputs, *sizes: int) -> tuple[tuple[Any, ...], Inputs]:
    scales = _scales(inputs)
    tensors = [value for name, value in inputs.items() if name not in scales]
    return (*tensors, *sizes), scales


def _half_reference(name: str, case: Any, inputs: Inputs, *sizes: int) -> Any:
    from tiercel.ops.moe import reference as ref

    wide = {key: value.double() if key in ("x", "w") else value for key, value in inputs.items()}
    weights = next(key for key in ("w_up", "w_down") if key in wide)
    wide[weights] = Wide(wide[weights])
    arguments, scales = _half_call(case, wide, *sizes)
    return getattr(ref, name)(*arguments, **scales)


def check_product(expected: Any, result: Any) -> Error:
    """One product's result, of a half or a peer's: of float8 operands nothing is rounded but it."""
    return _check({"x": result.new_empty(0)}, expected, (result,), None)


def _half_bytes(matrices: int, case: Any) -> int:
    element = _ELEMENT if case["weights"] == "same" else 1
    return int(element * active(case) * matrices * case["I"] * case["H"])


def _check_half(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    return check_product(expected, *outputs)


_HALF = _PARAMS | {"bs": 64, "weights": "same"}
_UP = OpBench(
    family="moe",
    op="moe_up",
    params=_HALF,
    invalid=invalid,
    make=_make_up,
    call=lambda case, inputs: _half_call(case, inputs, case["k"], case["bs"]),
    out=lambda case, inputs: None,
    bytes_moved=partial(_half_bytes, 2),
    flops=lambda case: _flops(case) * 2 // 3,
    reference=lambda case, inputs: _half_reference("moe_up", case, inputs, case["k"], case["bs"]),
    check=_check_half,
)
_DOWN = OpBench(
    family="moe",
    op="moe_down",
    params=_HALF,
    invalid=invalid,
    make=_make_down,
    call=lambda case, inputs: _half_call(case, inputs, case["bs"]),
    out=lambda case, inputs: None,
    bytes_moved=partial(_half_bytes, 1),
    flops=lambda case: _flops(case) // 3,
    reference=lambda case, inputs: _half_reference("moe_down", case, inputs, case["bs"]),
    check=_check_half,
)

BENCHES = [_FUSED, _UP, _DOWN]
