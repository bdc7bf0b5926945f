# SPDX-License-Identifier: Apache-2.0
"""Smoke cases of the activations, and the contract of their plug-ins."""

from __future__ import annotations

from typing import Any

from tiercel.core.spec import FLOATS, Call
from tiercel.ops.activation.spec import GATED, SPECS
from tiercel.plugins.contract import Case, Contract, TensorSpec

_SIZES = ((1, 8), (3, 1000), (33, 264), (129, 77), (0, 64))


def _cases(options: dict[str, Any]) -> tuple[Case, ...]:
    chosen = zip(_SIZES, FLOATS * 2, strict=False)
    cases = [Case({"M": m, "N": n}, dtype, options) for (m, n), dtype in chosen]
    cases += [Case({"M": 33, "N": 264}, "bfloat16", options, "strided")]
    return tuple(cases)


def _make(gated: bool) -> Any:
    def make(case: Case, device: str, seed: int) -> dict[str, Any]:
        import torch

        rows, columns = case.sizes["M"], case.sizes["N"]
        # On the CPU and then moved: the same numbers on every device.
        generator = torch.Generator().manual_seed(seed)
        both = 2 * torch.randn(rows, 2 * columns, generator=generator)
        x, up = both.to(device=device, dtype=getattr(torch, case.dtype)).chunk(2, dim=1)
        if case.values != "strided":
            x, up = x.contiguous(), up.contiguous()
        return {"x": x, **({"up": up} if gated else {}), **case.options}

    return make


def flat_gate(backend: Any, call: Call, gated: bool) -> Any:
    """The result of a backend, which gets the rows of a gate and a factor, for any call."""
    import torch

    inputs, gate = [call.x], call.x
    if gated:
        inputs = [call.x, call.up] if call.up is not None else list(call.x.chunk(2, dim=-1))
        gate = inputs[0]
    inputs = [t.reshape(-1, t.shape[-1]) if t.dim() else t.reshape(1, 1) for t in inputs]
    options = [call.approximate] if "approximate" in call else []
    (result,) = backend(*inputs, *options)
    result = result.view(gate.shape)
    if call.scale is None:
        return result
    largest = torch.finfo(torch.float8_e4m3fn).max
    scaled = (result.float() * call.scale.reciprocal()).clamp(-largest, largest)
    return scaled.to(torch.float8_e4m3fn)


def _contract(op: str) -> Contract:
    gated, has_option = op in GATED, "gelu" in op
    chosen = {"approximate": "tanh"} if has_option else {}
    others = _cases({"approximate": "none"}) if has_option else ()
    spec = SPECS[op].without("scale")
    result = spec.results[0]
    return Contract.of(
        "activation",
        spec.having("up") if gated else spec,
        replaced={
            "x": TensorSpec("x", ("M", "N"), FLOATS, strided=True),
            "up": TensorSpec("up", ("M", "N"), ("x",), strided=True),
            "out": TensorSpec("out", ("M", "N"), ("x",), rtol=result.rtol, atol=result.atol),
        },
        cases=_cases(chosen) + others,
        timing={
            "cpu": Case({"M": 256, "N": 1024}, "bfloat16", chosen),
            "cuda": Case({"M": 8192, "N": 4096}, "bfloat16", chosen),
        },
        make=_make(gated),
    )


CONTRACTS = tuple(map(_contract, SPECS))

# Names in tiercel.plugins.types.
ALIASES = {
    "ActivationInput": "silu.x",
    "ActivationResult": "silu.out",
    "GateInput": "silu_and_mul.x",
    "Factor": "gelu_and_mul.up",
    "GatedResult": "silu_and_mul.out",
}
PROTOCOLS = {
    "silu": "Activation",
    "relu": "Activation",
    "silu_and_mul": "GatedActivation",
    "relu_and_mul": "GatedActivation",
    "gelu_and_mul": "GatedGelu",
}
