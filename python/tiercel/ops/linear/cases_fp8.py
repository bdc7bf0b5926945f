# SPDX-License-Identifier: Apache-2.0
"""Float8 training: the weight's gradient, and a layer forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.ops.linear.cases_mlp import _check, _elements
from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

RESULTS = {"float32": 4, "bfloat16": 2}


def _sizes(params: Mapping[str, Any]) -> str | None:
    sizes = [value for name, value in params.items() if len(name) == 1]
    if not all(isinstance(size, int) and size > 0 and size % 16 == 0 for size in sizes):
        return "sizes must be positive multiples of 16"
    return None


def _invalid(params: Mapping[str, Any]) -> str | None:
    if params["result"] not in RESULTS:
        return f"`result` must be one of {', '.join(RESULTS)}"
    return _sizes(params)


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    from tiercel.ops.quant import reference as quant

    generator = torch.Generator(device=device).manual_seed(seed)

    def quantized(rows: int) -> tuple[Any, Any]:
        values = torch.randn(rows, case["P"], device=device, generator=generator)
        q, scale = quant.fp8_quantize(values.mul_(case["P"] ** -0.25), "1x128")
        return q, scale.t().contiguous()

    (grad, grad_scale), (x, x_scale) = quantized(case["N"]), quantized(case["K"])
    return {"grad": grad, "x": x, "grad_scale": grad_scale, "x_scale": x_scale}


def _dtype(case: Any) -> Any:
    import torch

    return getattr(torch, case["result"])


def _bytes(case: Any) -> int:
    operands = _elements(case, ("NP", 1 + 4 / 128), ("KP", 1 + 4 / 128))
    return round(operands + _elements(case, ("NK", RESULTS[case["result"]])))


def _reference(case: Any, inputs: Inputs) -> tuple[Any, ...]:
    rows, columns = (
        inputs[name].double()
        * inputs[f"{name}_scale"].t().double().repeat_interleave(128, 1)[:, : case["P"]]
        for name in ("grad", "x")
    )
    return (rows @ columns.T,)


def _check_sums(inputs: Inputs, expected: tuple[Any, ...], outputs: Any, launch: Launch) -> Error:
    """Tensor cores drop less of float8 products than a bfloat16's rounding: float32 results are
    held to that too."""
    return _check(inputs, expected, tuple(result.bfloat16() for result in outputs), launch)


# ------------------------------------------------------------------------------------- the layer


def _make_layer(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    m, n, k = (case[name] for name in "MNK")

    def random(*shape: int, scale: float = 1.0) -> Any:
        drawn = torch.randn(*shape, device=device, generator=generator)
        return drawn.mul_(scale).bfloat16()

    x, weight = random(m, k).requires_grad_(), random(n, k, scale=k**-0.5).requires_grad_()
    return {"x": x, "weight": weight, "grad": random(m, n)}


def _layer_reference(case: Any, inputs: Inputs) -> tuple[Any, ...]:
    x, weight, grad = (inputs[name].detach().double() for name in ("x", "weight", "grad"))
    return x @ weight.T, grad @ weight, grad.T @ x


def _check_layer(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """Operands are rounded to three bits: by 2.6 % in the root mean square, two of them by 3.7 %.
    Sums of many products keep that."""
    worst = Error(rms=0.0, maximum=0.0)
    for result, due in zip(outputs, expected, strict=True):
        if result.shape != due.shape:
            raise WrongResult(f"shape {tuple(result.shape)}, {tuple(due.shape)} due")
        errors = (result.double() - due).abs_()
        rms = float(errors.square().mean().sqrt() / due.square().mean().sqrt())
        if not rms <= 0.045:
            raise WrongResult(f"RMS error {rms:.1e}, tolerance 4.5e-02")
        maximum = float(errors.max() / due.abs().max())
        worst = Error(rms=max(worst.rms, rms), maximum=max(worst.maximum, maximum))
    return worst


def forward_and_backward(layer: Any, inputs: Inputs) -> tuple[Any, ...]:
    """A layer's result and the gradients of x and weight."""
    import torch

    x, weight = inputs["x"], inputs["weight"]
    result = layer(x, weight)
    return result.detach(), *torch.autograd.grad(result, (x, weight), inputs["grad"])


def _ours(case: Any, inputs: Inputs, backend: str) -> Launch:
    import tiercel

    def layer(x: Any, weight: Any) -> Any:
        return tiercel.fp8_linear_training(x, weight, backend=backend)

    kernels = "fp8_quantize_transpose, fp8_linear, fp8_linear_weight_grad"
    return Launch(
        lambda: forward_and_backward(layer, inputs), strict=True, details={"kernel": kernels}
    )


BENCHES = [
    OpBench(
        family="linear",
        op="fp8_linear_weight_grad",
        params={"N": None, "K": None, "P": None, "result": "float32"},
        invalid=_invalid,
        make=_make,
        call=lambda case, inputs: (tuple(inputs.values()), {"dtype": _dtype(case)}),
        out=lambda case, i: i["x_scale"].new_empty(case["N"], case["K"], dtype=_dtype(case)),
        bytes_moved=_bytes,
        flops=lambda case: 2 * _elements(case, ("NKP", 1)),
        reference=_reference,
        check=_check_sums,
    ),
    OpBench(
        family="linear",
        op="fp8_linear_training",
        params={"M": None, "N": None, "K": None},
        invalid=_sizes,
        make=_make_layer,
        call=lambda case, inputs: ((), {}),
        out=lambda case, inputs: None,
        bytes_moved=lambda c: 2 * _elements(c, ("MN", 2), ("NK", 3), ("MK", 3)),
        flops=lambda case: 6 * _elements(case, ("MNK", 1)),
        reference=_layer_reference,
        check=_check_layer,
        ours=_ours,
    ),
]
