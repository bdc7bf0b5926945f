# SPDX-License-Identifier: Apache-2.0
"""Activations, plain and gated."""

from __future__ import annotations

from typing import Any

from tiercel.plugins.contract import Case, Contract, ScalarSpec, TensorSpec

_DTYPES = ("float32", "bfloat16", "float16")
_SIZES = ((1, 8), (3, 1000), (33, 264), (129, 77), (0, 64))


def _cases(options: dict[str, Any]) -> tuple[Case, ...]:
    chosen = zip(_SIZES, _DTYPES * 2, strict=False)
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


def _flat(call: Any, inputs: list[Any], options: tuple[Any, ...]) -> Any:
    """The result for tensors of any number of dimensions."""
    x = inputs[0]
    shaped = [t.reshape(-1, t.shape[-1]) if t.dim() else t.reshape(1, 1) for t in inputs]
    (result,) = call(*shaped, *options)
    return result.view(x.shape)


def _quantized(result: Any, scale: Any) -> Any:
    import torch

    largest = torch.finfo(torch.float8_e4m3fn).max
    scaled = (result.float() * scale.reciprocal()).clamp(-largest, largest)
    return scaled.to(torch.float8_e4m3fn)


def _variants(op: str, gated: bool, options: int) -> dict[str, Any]:
    def variant(up: bool, scale: bool, out: bool) -> Any:
        def run(call: Any, x: Any, *rest: Any) -> Any:
            values = list(rest)
            halves = list(x.chunk(2, dim=-1)) if gated and not up else [x]
            inputs = [*halves, *([values.pop(0)] if up else [])]
            factor = values.pop(0) if scale else None
            target = values.pop(0) if out else None
            result = _flat(call, inputs, tuple(values))
            if factor is not None:
                result = _quantized(result, factor)
            if target is None:
                return result
            target.copy_(result)
            return None

        return run

    def backward(call: Any, grad: Any, x: Any, *rest: Any) -> Any:
        """The reference's gradient, whatever the backend."""
        from tiercel.ops.activation.reference import backward

        up = rest[0] if len(rest) > options else None
        found = tuple(
            g.contiguous() for g in backward(op, grad, x, up, *rest[len(rest) - options :])
        )
        return found if up is not None else found[0]

    made: dict[str, Any] = {}
    for up in (True, False) if gated else (False,):
        packed = "_packed" if gated and not up else ""
        for scale in (False, True):
            for out in (False, True):
                name = f"{op}{packed}{'_fp8' * scale}{'_out' * out}"
                made[name] = variant(up, scale, out)
        made[f"{op}{packed}_backward"] = backward
    return made


def _contract(op: str, gated: bool, has_option: bool) -> Contract:
    inputs = [TensorSpec("x", ("M", "N"), _DTYPES, strided=True)]
    inputs += [TensorSpec("up", ("M", "N"), ("x",), strided=True)] if gated else []
    options = (ScalarSpec("approximate", "str"),) if has_option else ()
    chosen = {"approximate": "tanh"} if has_option else {}
    others = _cases({"approximate": "none"}) if has_option else ()
    return Contract(
        family="activation",
        op=op,
        arguments=(*inputs, *options),
        # Two roundings to bfloat16, 2**-9 each, before and after the product.
        outputs=(TensorSpec("out", ("M", "N"), ("x",), rtol=8e-3, atol=1e-5),),
        cases=_cases(chosen) + others,
        timing={
            "cpu": Case({"M": 256, "N": 1024}, "bfloat16", chosen),
            "cuda": Case({"M": 8192, "N": 4096}, "bfloat16", chosen),
        },
        make=_make(gated),
        variants=_variants(op, gated, int(has_option)),
    )


SILU_AND_MUL = _contract("silu_and_mul", True, False)
GELU_AND_MUL = _contract("gelu_and_mul", True, True)
RELU_AND_MUL = _contract("relu_and_mul", True, False)
SILU = _contract("silu", False, False)
GELU = _contract("gelu", False, True)
RELU = _contract("relu", False, False)

CONTRACTS = (SILU_AND_MUL, GELU_AND_MUL, RELU_AND_MUL, SILU, GELU, RELU)
