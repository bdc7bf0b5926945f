# SPDX-License-Identifier: Apache-2.0
"""Normalisation over the last dimension."""

from __future__ import annotations

from itertools import product
from typing import Any

from tiercel.plugins.contract import Case, Contract, ScalarSpec, TensorSpec


def _case(rows: int, columns: int, dtype: str, values: str = "weight") -> Case:
    return Case({"M": rows, "N": columns}, dtype, {"eps": 1e-5}, values)


_CASES = (
    _case(1, 64, "bfloat16"),
    _case(33, 128, "float32", "weight bias"),
    _case(7, 1000, "float16", "bias"),
    _case(16, 1024, "bfloat16", "weight residual"),
    _case(5, 4096, "float32", "plain"),
    _case(3, 8192, "bfloat16", "weight bias residual"),
    _case(2, 20000, "bfloat16"),
    _case(9, 77, "float16"),
    _case(0, 256, "bfloat16", "weight residual"),
    _case(12, 512, "bfloat16", "weight strided"),
    _case(12, 512, "bfloat16", "float32-weight"),
)


def _make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    rows, columns = (case.sizes[name] for name in "MN")
    words = case.values.split()
    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    x = random(rows, columns) + 0.5
    if "strided" in words:
        x = torch.cat([x, -x], dim=1)[:, :columns]
    weight = random(columns) if "weight" in words else None
    if "float32-weight" in words:
        weight = random(columns).float()
    return {
        "x": x,
        "weight": weight,
        "bias": random(columns) if "bias" in words else None,
        "residual": random(rows, columns) if "residual" in words else None,
        **case.options,
    }


def _called(call: Any, x: Any, weight: Any, bias: Any, residual: Any, eps: float) -> Any:
    columns = x.shape[-1]
    rows = x.reshape(-1, columns)
    results = call(
        rows, weight, bias, None if residual is None else residual.reshape(rows.shape), eps
    )
    results = tuple(result.view(x.shape) for result in results)
    return results[0] if residual is None else results


def _variant(present: tuple[bool, ...]) -> Any:
    def run(call: Any, *args: Any) -> Any:
        values = iter(args)
        x = next(values)
        return _called(call, x, *[next(values) if there else None for there in present], *values)

    return run


def _out_variant(present: tuple[bool, ...]) -> Any:
    def run(call: Any, *args: Any) -> None:
        values = iter(args)
        x = next(values)
        tensors = [next(values) if there else None for there in present]
        outs = [next(values) for _ in range(1 + present[2])]
        results = _called(call, x, *tensors, *values)
        for out, result in zip(outs, results if present[2] else (results,), strict=True):
            out.copy_(result)

    return run


def _backward_variant(layer: bool, present: tuple[bool, ...]) -> Any:
    """A backend has no gradients of its own: the reference's."""

    def run(call: Any, *args: Any) -> Any:
        from tiercel.ops.norm.reference import norm_backward

        values = iter(args)
        x = next(values)
        weight, grad_residual = [next(values) if there else None for there in present]
        return norm_backward(layer, x, weight, next(values), grad_residual, *values)

    return run


def _suffix(names: tuple[str, ...], present: tuple[bool, ...]) -> str:
    return "".join(f"_no_{name}" for name, there in zip(names, present, strict=True) if not there)


def _variants(op: str) -> dict[str, Any]:
    variants = {}
    for present in product((True, False), repeat=3):
        name = op + _suffix(("weight", "bias", "residual"), present)
        variants[name] = _variant(present)
        variants[f"{name}_out"] = _out_variant(present)
    for choice in product((True, False), repeat=2):
        name = f"{op}_backward{_suffix(('weight', 'grad_residual'), choice)}"
        variants[name] = _backward_variant(op == "layer_norm", choice)
    return variants


def _contract(op: str) -> Contract:
    parameter = ("bfloat16", "float16", "float32")
    return Contract(
        family="norm",
        op=op,
        arguments=(
            TensorSpec("x", ("M", "N"), ("float32", "bfloat16", "float16"), strided=True),
            TensorSpec("weight", ("N",), parameter, optional=True),
            TensorSpec("bias", ("N",), parameter, optional=True),
            TensorSpec("residual", ("M", "N"), ("x",), strided=True, optional=True),
            ScalarSpec("eps", "float"),
        ),
        # bfloat16 rounds by 2**-9, the sum with residual first: 2**-9 of what is then normalised.
        outputs=(
            TensorSpec("out", ("M", "N"), ("x",), rtol=1.6e-2, atol=2e-2),
            TensorSpec(
                "residual_out", ("M", "N"), ("x",), rtol=8e-3, atol=8e-3, comes_with="residual"
            ),
        ),
        cases=_CASES,
        timing={
            "cpu": _case(256, 1024, "bfloat16"),
            "cuda": _case(8192, 4096, "bfloat16"),
        },
        make=_make,
        variants=_variants(op),
    )


RMS_NORM = _contract("rms_norm")
LAYER_NORM = _contract("layer_norm")

CONTRACTS = (RMS_NORM, LAYER_NORM)
