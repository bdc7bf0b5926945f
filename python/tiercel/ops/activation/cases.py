# SPDX-License-Identifier: Apache-2.0
"""Activations, plain and gated, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
FORMS = ("packed", "pair")
_OPTIONS = ("none", "tanh")


def _invalid(params: Mapping[str, Any]) -> str | None:
    if params.get("form", "packed") not in FORMS:
        return f"`form` must be one of {', '.join(FORMS)}"
    if params.get("approximate", "none") not in _OPTIONS:
        return f"`approximate` must be one of {', '.join(_OPTIONS)}"
    if not isinstance(params.get("fp8", False), bool):
        return "`fp8` must be true or false"
    if not all(isinstance(params[name], int) and params[name] > 0 for name in "MN"):
        return "M and N must be positive whole numbers"
    return None


def _make(gated: bool, case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    m, n = case["M"], case["N"]

    def random(columns: int) -> Any:
        return torch.randn(m, columns, device=device, generator=generator).to(dtype)

    packed = gated and case["form"] == "packed"
    inputs = {"x": random(2 * n if packed else n), "up": None, "scale": None, "grad": random(n)}
    if gated and not packed:
        inputs["up"] = random(n)
    if case.params.get("fp8"):
        inputs["scale"] = torch.full((1,), 0.02, device=device)
    return inputs


def options(case: Any) -> dict[str, Any]:
    return {"approximate": case["approximate"]} if "approximate" in case.params else {}


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tensors = (inputs["x"],) if inputs["up"] is None else (inputs["x"], inputs["up"])
    scale = {} if inputs["scale"] is None else {"scale": inputs["scale"]}
    return tensors, options(case) | scale


def empty_output(case: Any, inputs: Inputs) -> Any:
    import torch

    dtype = inputs["x"].dtype if inputs["scale"] is None else torch.float8_e4m3fn
    return torch.empty(case["M"], case["N"], dtype=dtype, device=inputs["x"].device)


def _bytes(gated: bool, backward: bool, case: Any) -> int:
    element = _ELEMENT[case.dtype]
    result = 1 if case.params.get("fp8") else element
    factors = 2 if gated else 1
    moved = (2 * factors + 1) * element if backward else factors * element + result
    return int(case["M"] * case["N"] * moved)


def wide(op: str, case: Any, inputs: Inputs) -> tuple[Any, list[Any]]:
    """The result in float64, not divided by the scale, and what it depends on."""
    from tiercel import ref

    tensors = [t.double().requires_grad_() for t in (inputs["x"], inputs["up"]) if t is not None]
    return getattr(ref, op)(*tensors, **options(case)), tensors


def _reference(op: str, case: Any, inputs: Inputs) -> Any:
    result = wide(op, case, inputs)[0].detach()
    return (result,) if inputs["scale"] is None else (result / inputs["scale"].double(),)


def _backward_reference(op: str, case: Any, inputs: Inputs) -> Any:
    import torch

    result, tensors = wide(op, case, inputs)
    return torch.autograd.grad(result, tensors, inputs["grad"].double())


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """In units of the dtype's rounding: others may round before the product, and in between."""
    import torch

    if len(outputs) != len(expected):
        raise WrongResult(f"{len(outputs)} results, {len(expected)} are due")
    rms = maximum = 0.0
    for result, due in zip(outputs, expected, strict=True):
        narrow = result.dtype == torch.float8_e4m3fn
        if result.shape != due.shape:
            raise WrongResult(f"shape {tuple(result.shape)}")
        due = due.clamp(-448, 448) if narrow else due
        unit = 2.0**-4 if narrow else torch.finfo(result.dtype).eps / 2
        tiny = 2.0**-10 if narrow else 4 * unit
        errors = (result.double() - due).abs_()
        worst = float((errors / due.abs().mul_(4 * unit).add_(tiny)).max())
        if not worst <= 1:
            raise WrongResult(f"a result is off by {worst:.1f} times its tolerance")
        rms = max(rms, float(errors.square().mean().sqrt() / due.square().mean().sqrt()))
        maximum = max(maximum, float(errors.max() / due.abs().max()))
    return Error(rms=rms, maximum=maximum)


def _ours_backward(op: str, gated: bool, case: Any, inputs: Inputs, backend: str) -> Launch:
    """The operator that the gradient calls; a user meets it only in ``backward()``."""
    import torch

    function = getattr(torch.ops.tiercel, f"{op}_backward")
    tensors = [inputs[name] for name in ("grad", "x", *["up"] * gated)]
    chosen = tuple(options(case).values())

    def run() -> tuple[Any, ...]:
        result = function(*tensors, *chosen, backend)
        if not gated:
            return (result,)
        return tuple(result) if inputs["up"] is not None else (result[0],)

    return Launch(run, strict=True, details={"kernel": f"{op}_backward"})


def _bench(op: str, backward: bool) -> OpBench:
    gated = op.endswith("_and_mul")
    params: dict[str, Any] = {"M": None, "N": None}
    params |= {"form": "packed"} if gated else {}
    params |= {"approximate": "none"} if op.startswith("gelu") else {}
    params |= {} if backward else {"fp8": False}
    return OpBench(
        family="activation",
        op=f"{op}_backward" if backward else op,
        params=params,
        invalid=_invalid,
        make=partial(_make, gated),
        call=_call,
        out=empty_output,
        bytes_moved=partial(_bytes, gated, backward),
        reference=partial(_backward_reference if backward else _reference, op),
        check=_check,
        ours=partial(_ours_backward, op, gated) if backward else None,
    )


OPS = ("silu_and_mul", "gelu_and_mul", "relu_and_mul", "silu", "gelu", "relu")
BENCHES = [_bench(op, backward) for backward in (False, True) for op in OPS]
