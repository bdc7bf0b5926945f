# SPDX-License-Identifier: Apache-2.0
"""Linear layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from tiercel.plugins.contract import Case, Contract, ScalarSpec, TensorSpec


def _case(rows: int, n: int, k: int, dtype: str, activation: str, values: str = "bias") -> Case:
    return Case({"M": rows, "N": n, "K": k}, dtype, {"activation": activation}, values)


_CASES = (
    _case(1, 64, 64, "bfloat16", "gelu"),
    _case(16, 128, 256, "float16", "gelu_tanh"),
    _case(33, 72, 136, "bfloat16", "silu"),
    _case(128, 256, 64, "bfloat16", "relu"),
    _case(129, 200, 512, "float16", "none"),
    _case(7, 8, 8, "bfloat16", "gelu"),
    _case(0, 64, 64, "bfloat16", "gelu"),
    _case(65, 128, 128, "bfloat16", "gelu", "no bias"),
    _case(65, 128, 128, "float16", "gelu", "strided"),
)


def _maker(parts: int) -> Any:
    """Inputs; `parts` rows of the weight for a column of the result."""

    def make(case: Case, device: str, seed: int) -> dict[str, Any]:
        import torch

        rows, n, k = (case.sizes[name] for name in "MNK")
        # On the CPU and then moved: the same numbers on every device.
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, case.dtype)

        def random(*shape: int) -> Any:
            return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

        x = random(rows, k)
        if case.values == "strided":
            x = torch.cat([x, -x], dim=1)[:, :k]
        bias = None if case.values == "no bias" else random(parts * n)
        # Sums of about 1, where activations bend.
        weight = random(parts * n, k) * k**-0.5
        return {"x": x, "weight": weight, "bias": bias, **case.options}

    return make


def _shaped(call: Any, x: Any, *rest: Any) -> Any:
    (result,) = call(x.reshape(-1, x.shape[-1]), *rest)
    return result.view(*x.shape[:-1], result.shape[1])


def _variant(bias: bool, residual: bool, out: bool, sums: bool) -> Any:
    def run(call: Any, x: Any, weight: Any, *rest: Any) -> Any:
        values = list(rest)
        b, added, target = (values.pop(0) if there else None for there in (bias, residual, out))
        (activation,) = values
        result = _shaped(call, x, weight, b, activation)
        if added is not None:
            result = result + added
        if target is not None:
            target.copy_(result)
            return None
        return (result, _shaped(call, x, weight, b, "none")) if sums else result

    return run


def _variants(op: str, residuals: bool, sums: bool) -> dict[str, Any]:
    """By operator, as Linear names them."""
    flags = (False, True)
    found = {}
    for bias, residual, mode in product(flags, flags[: 1 + residuals], ("", "_out", "_sums")):
        if mode != "_sums" or sums:
            name = op + "_no_bias" * (not bias) + "_residual" * residual + mode
            found[name] = _variant(bias, residual, mode == "_out", mode == "_sums")
    return found


_16_BIT = ("bfloat16", "float16")

LINEAR_ACT = Contract(
    family="linear",
    op="linear_act",
    arguments=(
        TensorSpec("x", ("M", "K"), _16_BIT, strided=True),
        TensorSpec("weight", ("N", "K"), ("x",), strided=True),
        TensorSpec("bias", ("N",), ("x",), strided=True, optional=True),
        ScalarSpec("activation", "str"),
    ),
    # Two roundings to bfloat16, 2**-9 each, before and after the activation. Sums are of about 1,
    # their products' magnitudes of at most 30: of those float32 sums lose less than 2**-18.
    outputs=(TensorSpec("out", ("M", "N"), ("x",), rtol=8e-3, atol=4e-3),),
    cases=_CASES,
    timing={
        "cpu": _case(64, 256, 256, "bfloat16", "gelu"),
        "cuda": _case(4096, 4096, 1024, "bfloat16", "gelu"),
    },
    make=_maker(1),
    variants=_variants("linear_act", True, True),
)

GATED_LINEAR = Contract(
    family="linear",
    op="gated_linear",
    arguments=(
        TensorSpec("x", ("M", "K"), _16_BIT, strided=True),
        TensorSpec("weight", ("2N", "K"), ("x",), strided=True),
        TensorSpec("bias", ("2N",), ("x",), strided=True, optional=True),
        ScalarSpec("activation", "str"),
    ),
    # Roundings to bfloat16, 2**-9 each: of both halves, of the activation, of the product.
    outputs=(TensorSpec("out", ("M", "N"), ("x",), rtol=1.2e-2, atol=8e-3),),
    cases=tuple(
        replace(case, options={"activation": "silu"})
        if case.options["activation"] in ("none", "relu")
        else case
        for case in _CASES
    ),
    timing={
        "cpu": _case(64, 256, 256, "bfloat16", "silu"),
        "cuda": _case(4096, 4096, 1024, "bfloat16", "silu"),
    },
    make=_maker(2),
    derive=lambda sizes, values: {"N": sizes["2N"] // 2},
    variants=_variants("gated_linear", False, False),
)


def _make_fp8(case: Case, device: str, seed: int) -> dict[str, Any]:
    """One scale of all where the case says so, else one a row."""
    import torch

    rows, n, k = (case.sizes[name] for name in "MNK")
    generator = torch.Generator().manual_seed(seed)
    whole = case.values == "scales of all"

    def quantized(count: int, factor: float) -> tuple[Any, Any]:
        values = torch.randn(count, k, generator=generator)
        largest = values.abs().amax(1) if count else values.new_zeros(0)
        scale = (values.new_full((1,), 4.0) if whole else largest) / 448
        narrow = (values / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return narrow.to(device), (scale * factor).to(device)

    x, x_scale = quantized(rows, 1.0)
    weight, weight_scale = quantized(n, k**-0.5)
    if case.values == "strided":
        x = torch.cat([x, x], dim=1)[:, :k]
    bias = torch.randn(n, generator=generator).to(device=device, dtype=torch.bfloat16)
    return {
        "x": x,
        "weight": weight,
        "x_scale": x_scale,
        "weight_scale": weight_scale,
        "bias": None if case.values == "no bias" else bias,
        **case.options,
    }


def _fp8_variant(bias: bool, out: bool) -> Any:
    def run(call: Any, x: Any, weight: Any, x_scale: Any, weight_scale: Any, *rest: Any) -> Any:
        values = list(rest)
        b, target = (values.pop(0) if there else None for there in (bias, out))
        scales = (x_scale.reshape(-1), weight_scale.reshape(-1))
        (result,) = call(x.reshape(-1, x.shape[-1]), weight, *scales, b, *values)
        result = result.view(*x.shape[:-1], result.shape[1])
        if target is None:
            return result
        target.copy_(result)
        return None

    return run


def _fp8_sums(arguments: dict[str, Any]) -> Any:
    """Each element's sum of its products' magnitudes."""
    rows, columns = (
        arguments[name].float().abs() * arguments[scale].reshape(-1, 1)
        for name, scale in (("x", "x_scale"), ("weight", "weight_scale"))
    )
    return rows @ columns.T


_FP8 = ("float8_e4m3fn",)
_FP8_CASES = (
    _case(1, 64, 64, *_FP8, "none"),
    _case(33, 72, 144, *_FP8, "silu", "scales of all"),
    _case(129, 200, 512, *_FP8, "gelu"),
    _case(0, 64, 64, *_FP8, "none"),
    _case(65, 128, 128, *_FP8, "gelu_tanh", "no bias"),
    _case(65, 128, 128, *_FP8, "none", "strided"),
)

FP8_LINEAR = Contract(
    family="linear",
    op="fp8_linear",
    arguments=(
        TensorSpec("x", ("M", "K"), _FP8, strided=True),
        TensorSpec("weight", ("N", "K"), _FP8, strided=True),
        TensorSpec("x_scale", ("M or 1",), ("float32",)),
        TensorSpec("weight_scale", ("N or 1",), ("float32",)),
        TensorSpec("bias", ("N",), ("bfloat16",), strided=True, optional=True),
        ScalarSpec("activation", "str"),
    ),
    # One rounding to bfloat16; and the tensor cores' adders keep 13 bits behind the largest of 32
    # products and the sum so far: in a model of them that costs 2**-16 of the products' magnitudes
    # (root mean square), the worst of many sums 2**-12. An activation's slope is below 1.13.
    outputs=(
        TensorSpec("out", ("M", "N"), ("bfloat16",), rtol=8e-3, atol=1e-6, of_sums=1.13 * 2**-11),
    ),
    sums=_fp8_sums,
    cases=_FP8_CASES,
    timing={
        "cpu": _case(64, 256, 256, *_FP8, "none"),
        "cuda": _case(4096, 4096, 1024, *_FP8, "none"),
    },
    make=_make_fp8,
    variants={
        "fp8_linear" + "_no_bias" * (not bias) + "_out" * out: _fp8_variant(bias, out)
        for bias, out in product((False, True), (False, True))
    },
)

CONTRACTS = (LINEAR_ACT, GATED_LINEAR, FP8_LINEAR)

# Made of other operators.
WITHOUT_CONTRACT = ["fused_mlp"]
