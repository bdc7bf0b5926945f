# SPDX-License-Identifier: Apache-2.0
"""Linear layers."""

from __future__ import annotations

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


def _make(case: Case, device: str, seed: int) -> dict[str, Any]:
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
    bias = None if case.values == "no bias" else random(n)
    # Sums of about 1, where activations bend.
    return {"x": x, "weight": random(n, k) * k**-0.5, "bias": bias, **case.options}


def _shaped(call: Any, x: Any, *rest: Any) -> Any:
    (result,) = call(x.reshape(-1, x.shape[-1]), *rest)
    return result.view(*x.shape[:-1], result.shape[1])


def _without_bias(call: Any, x: Any, weight: Any, activation: str) -> Any:
    return _shaped(call, x, weight, None, activation)


def _into(call: Any, x: Any, weight: Any, bias: Any, out: Any, activation: str) -> None:
    out.copy_(_shaped(call, x, weight, bias, activation))


def _into_without_bias(call: Any, x: Any, weight: Any, out: Any, activation: str) -> None:
    out.copy_(_shaped(call, x, weight, None, activation))


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
    # Two roundings to bfloat16, 2**-9 each, before and after the activation.
    outputs=(TensorSpec("out", ("M", "N"), ("x",), rtol=8e-3, atol=4e-3),),
    cases=_CASES,
    timing={
        "cpu": _case(64, 256, 256, "bfloat16", "gelu"),
        "cuda": _case(4096, 4096, 1024, "bfloat16", "gelu"),
    },
    make=_make,
    variants={
        "linear_act": _shaped,
        "linear_act_no_bias": _without_bias,
        "linear_act_out": _into,
        "linear_act_no_bias_out": _into_without_bias,
    },
)

CONTRACTS = (LINEAR_ACT,)
