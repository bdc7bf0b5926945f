# SPDX-License-Identifier: Apache-2.0
"""Linear layers with their activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench, judged

ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh")
_ELEMENT = 2  # bytes; both dtypes have 16 bits


def activate(name: str, sums: Any) -> Any:
    """PyTorch's activation, in the dtype of `sums`."""
    from torch.nn import functional

    if name == "none":
        return sums
    if name == "gelu_tanh":
        return functional.gelu(sums, approximate="tanh")
    return getattr(functional, name)(sums)


def _invalid(params: Mapping[str, Any]) -> str | None:
    if params["act"] not in ACTIVATIONS:
        return f"`act` must be one of {', '.join(ACTIVATIONS)}"
    for name in ("bias", "residual"):
        if not isinstance(params[name], bool):
            return f"`{name}` must be true or false"
    sizes = [params[name] for name in "MNK"]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return "M, N and K must be positive whole numbers"
    return None


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def random(*shape: int, scale: float = 1.0) -> Any:
        drawn = torch.randn(*shape, device=device, generator=generator)
        return drawn.mul_(scale).to(dtype)

    x = random(case["M"], case["K"])
    # Sums of about 1, where activations bend.
    weight = random(case["N"], case["K"], scale=case["K"] ** -0.5)
    bias = random(case["N"]) if case["bias"] else None
    residual = random(case["M"], case["N"]) if case["residual"] else None
    return {"x": x, "weight": weight, "bias": bias, "residual": residual}


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = {"activation": case["act"], "residual": inputs["residual"]}
    return (inputs["x"], inputs["weight"], inputs["bias"]), options


def empty_output(case: Any, inputs: Inputs) -> Any:
    return inputs["x"].new_empty(case["M"], case["N"])


def _bytes(case: Any) -> int:
    m, n, k = (case[name] for name in "MNK")
    results = 2 if case["residual"] else 1
    return _ELEMENT * int(m * k + n * k + results * m * n + (n if case["bias"] else 0))


def _flops(case: Any) -> int:
    return 2 * int(case["M"] * case["N"] * case["K"])


def _reference(case: Any, inputs: Inputs) -> Any:
    """All of it: a GPU with float64 tensor cores has the largest case in some 20 ms."""
    sums = inputs["x"].double() @ inputs["weight"].double().T
    if inputs["bias"] is not None:
        sums += inputs["bias"].double()
    result = activate(case["act"], sums)
    return result if inputs["residual"] is None else result.add_(inputs["residual"])


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """Every element, and the RMS of the errors, in units of the dtype's rounding u (half an ulp).

    Others may round before the activation too: u twice, the first times at most 1.3 by the
    activation's slope. A product split along K may also round its partial sums, of about 1: four
    more u cover the worst element. What float32 sums lose grows with K. A part of the product that
    is missing or wrong exceeds all this: one tile by its largest errors, a little everywhere by
    the RMS.
    """
    import torch

    (result,) = outputs
    if result.shape != expected.shape or result.dtype != inputs["x"].dtype:
        raise WrongResult(f"shape {tuple(result.shape)}, {result.dtype}")
    unit = torch.finfo(result.dtype).eps / 2
    sums = inputs["x"].shape[-1] * 2.0**-23
    errors = (result.double() - expected).abs_()
    tolerance = expected.abs().mul_(2.5 * unit).add_(4 * unit + sums)
    return judged(errors, expected, tolerance, 1.5 * unit + sums / 4)


def _torch_linear(case: Any, inputs: Inputs) -> Callable[[], Any]:
    from torch.nn import functional

    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    return lambda: functional.linear(x, weight, bias)


BENCHES = [
    OpBench(
        family="linear",
        op="linear_act",
        params={
            "M": None,
            "N": None,
            "K": None,
            "act": "gelu_tanh",
            "bias": True,
            "residual": False,
        },
        invalid=_invalid,
        make=_make,
        call=_call,
        out=empty_output,
        bytes_moved=_bytes,
        flops=_flops,
        reference=_reference,
        check=_check,
        host_baselines={"torch.linear": _torch_linear},
    )
]
