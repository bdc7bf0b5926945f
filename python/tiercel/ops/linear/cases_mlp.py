# SPDX-License-Identifier: Apache-2.0
"""Gated linear layers, the MLP of two layers, a linear layer's backward, and float8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.ops.linear.cases import ACTIVATIONS, activate
from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench, judged

_ELEMENT = 2  # bytes; both dtypes have 16 bits
GATES = ACTIVATIONS[2:]


def _sizes(params: Mapping[str, Any], known: tuple[str, ...]) -> str | None:
    if params["act"] not in known:
        return f"`act` must be one of {', '.join(known)}"
    sizes = [value for name, value in params.items() if len(name) == 1]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return "sizes must be positive whole numbers"
    flags = [name for name in ("bias", "gated", "residual") if name in params]
    if not all(isinstance(params[name], bool) for name in flags):
        return f"{', '.join(flags)} must be true or false"
    return None


def _random(case: Any, device: str, seed: int) -> Any:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> Any:
        drawn = torch.randn(*shape, device=device, generator=generator)
        return drawn.mul_(scale).to(getattr(torch, case.dtype))

    return random


def _make_gated(case: Any, device: str, seed: int) -> Inputs:
    if case["blocks"]:
        return _make_fp8(case, device, seed, parts=2)
    random, m, n, k = _random(case, device, seed), *(case[name] for name in "MNK")
    bias = random(2 * n) if case["bias"] else None
    return {"x": random(m, k), "weight": random(2 * n, k, scale=k**-0.5), "bias": bias}


def _gate(case: Any, both: Any) -> Any:
    gate, up = both.chunk(2, dim=-1)
    return activate(case["act"], gate) * up


def _gated_reference(case: Any, inputs: Inputs) -> tuple[Any, ...]:
    return (_gate(case, _sums(inputs)),)


def _sums(inputs: Inputs) -> Any:
    """x @ weight.T + bias in float64, of float8 operands times their scales."""
    x, weight = (
        inputs[name].double()
        if f"{name}_scale" not in inputs
        else inputs[name].double() * _of_values(inputs[f"{name}_scale"], *inputs[name].shape, down)
        for name, down in (("x", 1), ("weight", SCALE_BLOCK))
    )
    sums = x @ weight.T
    return sums if inputs["bias"] is None else sums.add_(inputs["bias"].double())


def _call_gated(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = ("x_scale", "weight_scale") if case["blocks"] else ()
    options = {"activation": case["act"], **{name: inputs[name] for name in names}}
    return (inputs["x"], inputs["weight"], inputs["bias"]), options


def _gated_out(case: Any, inputs: Inputs) -> Any:
    import torch

    dtype = torch.bfloat16 if case["blocks"] else inputs["x"].dtype
    return inputs["x"].new_empty(case["M"], case["N"], dtype=dtype)


def _gated_bytes(case: Any) -> int:
    size, scales = _ELEMENT, 0.0
    if case["blocks"]:
        size = 1
        scales = _elements(case, ("MK", 4 / SCALE_BLOCK), ("NK", 8 / SCALE_BLOCK**2))
    return round(_elements(case, ("MK", size), ("NK", 2 * size), ("MN", _ELEMENT)) + scales)


def _gated_invalid(params: Mapping[str, Any]) -> str | None:
    if not isinstance(params["blocks"], bool):
        return "`blocks` must be true or false"
    why = _sizes(params, GATES)
    if (
        why is None
        and params["blocks"]
        and (params["K"] % SCALE_BLOCK or params["N"] % SCALE_BLOCK)
    ):
        return "N and K must be multiples of 128 with scales of blocks"
    return why


def _make_mlp(case: Any, device: str, seed: int) -> Inputs:
    random, m, n, h = _random(case, device, seed), *(case[name] for name in "MNH")
    return {
        "x": random(m, n),
        "up": random((1 + case["gated"]) * h, n, scale=n**-0.5),
        "down": random(n, h, scale=h**-0.5),
        "residual": random(m, n) if case["residual"] else None,
    }


def _mlp_reference(case: Any, inputs: Inputs) -> tuple[Any, ...]:
    sums = inputs["x"].double() @ inputs["up"].double().T
    hidden = _gate(case, sums) if case["gated"] else activate(case["act"], sums)
    result = hidden @ inputs["down"].double().T
    return (result if inputs["residual"] is None else result.add_(inputs["residual"]),)


def _make_backward(case: Any, device: str, seed: int) -> Inputs:
    random, m, n, k = _random(case, device, seed), *(case[name] for name in "MNK")
    x, weight = random(m, k), random(n, k, scale=k**-0.5)
    return {"x": x, "weight": weight, "sums": random(m, n), "grad": random(m, n)}


def _backward_reference(case: Any, inputs: Inputs) -> tuple[Any, ...]:
    import torch

    x, weight, sums, grad = (inputs[name].double() for name in ("x", "weight", "sums", "grad"))
    sums.requires_grad_()
    (slope,) = torch.autograd.grad(activate(case["act"], sums), sums, grad)
    found = (slope @ weight, slope.T @ x)
    return (*found, slope.sum(0)) if case["bias"] else found


FP8_ACTIVATIONS = ("none", *GATES)


_FP8_MAX, SCALE_BLOCK = 448, 128


def _make_fp8(case: Any, device: str, seed: int, parts: int = 1) -> Inputs:
    """`parts`: rows of the weight for a column of the result."""
    import torch

    random, m, n, k = _random(case, device, seed), *(case[name] for name in "MNK")
    n *= parts

    def quantized(rows: int, factor: float, down: int) -> tuple[Any, Any]:
        values = random(rows, k).float()
        if case["blocks"]:
            groups = values.abs().unflatten(1, (-1, SCALE_BLOCK)).amax(2)
            padded = torch.nn.functional.pad(groups, (0, 0, 0, -rows % down))
            scale = padded.unflatten(0, (-1, down)).amax(1) / _FP8_MAX
        else:
            scale = values.abs().amax(1, keepdim=True) / _FP8_MAX
        values /= _of_values(scale, rows, k, down)
        return values.clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn), scale * factor

    x, x_scale = quantized(m, 1.0, 1)
    weight, weight_scale = quantized(n, k**-0.5, SCALE_BLOCK)
    bias = random(n) if case["bias"] else None
    scales = {"x_scale": x_scale, "weight_scale": weight_scale}
    return {"x": x, "weight": weight, **scales, "bias": bias}


def _of_values(scale: Any, rows: int, columns: int, down: int) -> Any:
    """Scales as [rows, columns], or of rows as they are."""
    if scale.shape[1] == 1 and scale.shape[0] == rows:
        return scale
    return scale.repeat_interleave(down, 0)[:rows].repeat_interleave(SCALE_BLOCK, 1)[:, :columns]


def _fp8_invalid(params: Mapping[str, Any]) -> str | None:
    if not isinstance(params["blocks"], bool):
        return "`blocks` must be true or false"
    why = _sizes(params, FP8_ACTIVATIONS)
    if why is None and params["blocks"] and params["K"] % SCALE_BLOCK:
        return "K must be a multiple of 128 with scales of blocks"
    return why


def _fp8_bytes(case: Any) -> int:
    scales = [("M", 4), ("N", 4)]
    if case["blocks"]:
        scales = [("MK", 4 / SCALE_BLOCK), ("NK", 4 / SCALE_BLOCK**2)]
    return round(_elements(case, ("MK", 1), ("NK", 1), ("MN", 2), *scales))


def _call_fp8(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(inputs.values()), {"activation": case["act"]}


def _fp8_reference(case: Any, inputs: Inputs) -> tuple[Any, ...]:
    return (activate(case["act"], _sums(inputs)),)


def _ours_backward(case: Any, inputs: Inputs, backend: str) -> Launch:
    """The products of the gradient; a user meets them only in ``backward()``."""
    from tiercel.ops.linear.backward import products

    def run() -> tuple[Any, ...]:
        names = ("x", "weight", "sums", "grad")
        found = products(*(inputs[n] for n in names), case["act"], case["bias"], backend)
        return found if case["bias"] else found[:2]

    return Launch(run, strict=True, details={"kernel": "linear_act_backward"})


def _check(inputs: Inputs, expected: tuple[Any, ...], outputs: Any, launch: Launch) -> Error:
    """Every element, and the RMS of the errors, in units of the dtype's rounding u (half an ulp).

    What is between two products is rounded too, up to three times: each adds errors of about u
    of the result's RMS, of either sign, of which the worst of many is some six times as large.
    """
    import torch

    worst = Error(rms=0.0, maximum=0.0)
    for result, due in zip(outputs, expected, strict=True):
        if result.shape != due.shape:
            raise WrongResult(f"shape {tuple(result.shape)}, {tuple(due.shape)} due")
        unit = torch.finfo(result.dtype).eps / 2
        scale = float(due.square().mean().sqrt())
        tolerance = due.abs().mul_(2.5 * unit).add_(12 * unit * scale)
        error = judged((result.double() - due).abs_(), due, tolerance, 3 * unit)
        worst = Error(rms=max(worst.rms, error.rms), maximum=max(worst.maximum, error.maximum))
    return worst


def _elements(case: Any, *parts: tuple[str, float]) -> Any:
    """Products of sizes, each so many times."""
    total: Any = 0
    for names, times in parts:
        product: Any = times
        for name in names:
            product *= case[name]
        total += product
    return total


def _ours_mlp(case: Any, inputs: Inputs, backend: str) -> Launch:
    """Two operators, neither of which has the public function's name."""
    import tiercel

    options = {"activation": case["act"], "gated": case["gated"], "residual": inputs["residual"]}
    arguments = (inputs["x"], inputs["up"], inputs["down"])

    def run() -> tuple[Any, ...]:
        return (tiercel.fused_mlp(*arguments, **options, backend=backend),)

    return Launch(run, host=run, strict=True, details={"kernel": "two kernels"})


BENCHES = [
    OpBench(
        family="linear",
        op="gated_linear",
        params={
            **dict.fromkeys("MNK"),
            "act": "silu",
            "bias": False,
            "blocks": False,
        },
        invalid=_gated_invalid,
        make=_make_gated,
        call=_call_gated,
        out=_gated_out,
        bytes_moved=_gated_bytes,
        flops=lambda case: 2 * _elements(case, ("MNK", 2)),
        reference=_gated_reference,
        check=_check,
    ),
    OpBench(
        family="linear",
        op="fused_mlp",
        params={
            "M": None,
            "N": None,
            "H": None,
            "act": "silu",
            "gated": True,
            "residual": True,
        },
        invalid=lambda params: _sizes(params, ACTIVATIONS),
        make=_make_mlp,
        call=lambda case, i: (
            (i["x"], i["up"], i["down"]),
            {"activation": case["act"], "gated": case["gated"], "residual": i["residual"]},
        ),
        out=lambda case, inputs: None,
        bytes_moved=lambda c: (
            _ELEMENT * _elements(c, ("MN", 2 + c["residual"]), ("MH", 2), ("NH", 2 + c["gated"]))
        ),
        flops=lambda case: 2 * _elements(case, ("MNH", 2 + case["gated"])),
        reference=_mlp_reference,
        check=_check,
        ours=_ours_mlp,
    ),
    OpBench(
        family="linear",
        op="linear_act_backward",
        params={"M": None, "N": None, "K": None, "act": "gelu_tanh", "bias": True},
        invalid=lambda params: _sizes(params, ACTIVATIONS),
        make=_make_backward,
        call=lambda case, inputs: ((), {}),
        out=lambda case, inputs: None,
        bytes_moved=lambda c: _ELEMENT * _elements(c, ("MN", 2), ("NK", 2), ("MK", 2)),
        flops=lambda case: 4 * _elements(case, ("MNK", 1)),
        reference=_backward_reference,
        check=_check,
        ours=_ours_backward,
    ),
    OpBench(
        family="linear",
        op="fp8_linear",
        params={
            "M": None,
            "N": None,
            "K": None,
            "act": "none",
            "bias": False,
            "blocks": False,
        },
        invalid=_fp8_invalid,
        make=_make_fp8,
        call=_call_fp8,
        out=lambda case, i: i["x_scale"].new_empty(case["M"], case["N"]).bfloat16(),
        bytes_moved=_fp8_bytes,
        flops=lambda case: 2 * _elements(case, ("MNK", 1)),
        reference=_fp8_reference,
        check=_check,
    ),
]
