# SPDX-License-Identifier: Apache-2.0
"""Normalisation over the last dimension, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

EPS = 1e-5
_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
_WEIGHTS = ("same", "float32", "none")


def _invalid(params: Mapping[str, Any]) -> str | None:
    if params["weight"] not in _WEIGHTS:
        return f"`weight` must be one of {', '.join(_WEIGHTS)}"
    if not all(isinstance(params[name], bool) for name in ("bias", "residual")):
        return "`bias` and `residual` must be true or false"
    if not all(isinstance(params[name], int) and params[name] > 0 for name in "MN"):
        return "M and N must be positive whole numbers"
    return None


def _make(backward: bool, case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def random(*shape: int, dtype: Any = dtype) -> Any:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    rows = (case["M"], case["N"])
    parameter = torch.float32 if case["weight"] == "float32" else dtype
    inputs = {
        "x": random(*rows),
        "weight": None if case["weight"] == "none" else random(case["N"], dtype=parameter),
        "bias": random(case["N"], dtype=parameter) if case["bias"] else None,
        "residual": random(*rows) if case["residual"] else None,
    }
    if backward:  # of x, which is the sum where there was a residual
        inputs["grad_residual"] = inputs.pop("residual")
        inputs["grad"] = random(*rows)
    return inputs


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = {"eps": EPS}
    if inputs.get("residual") is not None:
        options["residual"] = inputs["residual"]
    return (inputs["x"], inputs["weight"], inputs["bias"]), options


def _out(case: Any, inputs: Inputs) -> Any:
    import torch

    out = torch.empty_like(inputs["x"])
    return out if inputs["residual"] is None else (out, torch.empty_like(out))


def _bytes(tensors: int, more: int, case: Any) -> int:
    """`tensors` of [M, N], `more` with a residual, and the parameters."""
    parameter = 4 if case["weight"] == "float32" else _ELEMENT[case.dtype]
    parameters = (case["weight"] != "none") + case["bias"]
    count = tensors + (more if case["residual"] else 0)
    return int(
        case["M"] * case["N"] * _ELEMENT[case.dtype] * count + case["N"] * parameter * parameters
    )


def _normal(layer: bool, x: Any) -> Any:
    if layer:
        x = x - x.mean(dim=-1, keepdim=True)
    return x * (x.square().mean(dim=-1, keepdim=True) + EPS).rsqrt()


def _total(inputs: Inputs) -> Any:
    """The rows that are normalised, rounded as the operator rounds them."""
    x, residual = inputs["x"], inputs["residual"]
    return x if residual is None else x + residual


def reference(layer: bool, case: Any, inputs: Inputs) -> tuple[Any, ...]:
    total = _total(inputs)
    result = _normal(layer, total.double())
    if inputs["weight"] is not None:
        result *= inputs["weight"].double()
    if inputs["bias"] is not None:
        result += inputs["bias"].double()
    return (result,) if inputs["residual"] is None else (result, total.double())


def _backward_reference(layer: bool, case: Any, inputs: Inputs) -> tuple[Any, ...]:
    from tiercel.ops.norm.reference import norm_backward

    weight, bias, added = (inputs[name] for name in ("weight", "bias", "grad_residual"))
    grads = norm_backward(
        layer,
        inputs["x"].double(),
        None if weight is None else weight.double(),
        inputs["grad"].double(),
        None if added is None else added.double(),
        weight is not None,
        bias is not None,
        inputs["x"].double().dtype,
        EPS,
    )
    return tuple(grad for grad in grads if grad.numel())


def check_norm(inputs: Inputs, expected: tuple[Any, ...], outputs: Any, launch: Launch) -> Error:
    """Every element, and the RMS of the errors, in units of the dtype's rounding.

    Others may round before the weight too, or sum in another order.
    """
    import torch

    if len(outputs) != len(expected):
        raise WrongResult(f"{len(outputs)} outputs, {len(expected)} due")
    worst = Error(rms=0.0, maximum=0.0)
    for result, due in zip(outputs, expected, strict=True):
        if result.shape != due.shape:
            raise WrongResult(f"shape {tuple(result.shape)}, {tuple(due.shape)} due")
        unit = torch.finfo(result.dtype).eps
        errors = (result.double() - due).abs_()
        largest, scale = float(errors.max()), float(due.abs().max())
        if not largest < float("inf"):
            raise WrongResult("a result is not finite")
        # Sums over rows lose with their number what sums over columns do with theirs.
        sums = 2.0**-24 * max(inputs["x"].shape) ** 0.5 * 4
        if largest > (4 * unit + sums) * scale:
            raise WrongResult(f"a result is off by {largest / scale:.1e} of the largest")
        rms = float(errors.square_().mean().sqrt() / due.square().mean().sqrt())
        if rms > 2 * unit + sums:
            raise WrongResult(f"RMS error {rms:.1e}, tolerance {2 * unit + sums:.1e}")
        worst = Error(rms=max(worst.rms, rms), maximum=max(worst.maximum, largest / scale))
    return worst


def _backward_ours(op: str, case: Any, inputs: Inputs, backend: str) -> Launch:
    """The operator that the gradient calls; a user meets it only in ``backward()``."""
    import torch

    weight, bias, added = (inputs[name] for name in ("weight", "bias", "grad_residual"))
    function = getattr(torch.ops.tiercel, f"{op}_backward")
    tensors = (inputs["x"], weight, inputs["grad"], added)
    dtype = inputs["x"].dtype if bias is None else bias.dtype
    wanted = (weight is not None, bias is not None)

    def run() -> tuple[Any, ...]:
        grads = function(*tensors, *wanted, dtype, EPS, backend)
        return tuple(grad for grad in grads if grad.numel())

    return Launch(run, strict=True, details={"kernel": f"{op}_backward"})


def _eager(name: str, case: Any, inputs: Inputs) -> Callable[[], Any]:
    from torch.nn import functional

    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    if name == "rms_norm":
        return lambda: functional.rms_norm(x, x.shape[-1:], weight, EPS)
    return lambda: functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _bench(op: str) -> OpBench:
    layer = op == "layer_norm"
    return OpBench(
        family="norm",
        op=op,
        params={"M": None, "N": None, "weight": "same", "bias": False, "residual": False},
        invalid=_invalid,
        make=partial(_make, False),
        call=_call,
        out=_out,
        bytes_moved=partial(_bytes, 2, 2),
        reference=partial(reference, layer),
        check=check_norm,
        host_baselines={f"torch.{op}": partial(_eager, op)},
    )


def _backward_bench(op: str) -> OpBench:
    layer = op == "layer_norm"
    return OpBench(
        family="norm",
        op=f"{op}_backward",
        params={"M": None, "N": None, "weight": "same", "bias": False, "residual": False},
        invalid=_invalid,
        make=partial(_make, True),
        call=_call,
        out=lambda case, inputs: None,
        bytes_moved=partial(_bytes, 3, 1),
        reference=partial(_backward_reference, layer),
        check=check_norm,
        ours=partial(_backward_ours, op),
    )


BENCHES = [make(op) for make in (_bench, _backward_bench) for op in ("rms_norm", "layer_norm")]
