# SPDX-License-Identifier: Apache-2.0
"""Linear layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiercel.core.spec import Call
from tiercel.ops.linear import spec
from tiercel.plugins.contract import Case, Contract, TensorSpec


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


LINEAR_ACT = Contract.of(
    "linear",
    spec.LINEAR_ACT.without("residual"),
    cases=_CASES,
    timing={
        "cpu": _case(64, 256, 256, "bfloat16", "gelu"),
        "cuda": _case(4096, 4096, 1024, "bfloat16", "gelu"),
    },
    make=_maker(1),
)

GATED_LINEAR = Contract.of(
    "linear",
    spec.GATED_LINEAR,
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

FP8_LINEAR = Contract.of(
    "linear",
    spec.FP8_LINEAR,
    replaced={
        name: TensorSpec(name, (f"{rows} or 1",), ("float32",))
        for name, rows in (("x_scale", "M"), ("weight_scale", "N"))
    },
    sums=_fp8_sums,
    cases=_FP8_CASES,
    timing={
        "cpu": _case(64, 256, 256, *_FP8, "none"),
        "cuda": _case(4096, 4096, 1024, *_FP8, "none"),
    },
    make=_make_fp8,
)


def call_backend(backend: Any, call: Call) -> Any:
    """The result of a backend, which knows no residual."""
    (result,) = LINEAR_ACT.run(backend, call)
    return result if call.residual is None else result + call.residual


def call_backend_twice(backend: Any, call: Call) -> Any:
    """The result and the preactivation."""
    plain = Call(**{**call.__dict__, "activation": "none", "residual": None})
    return call_backend(backend, call), call_backend(backend, plain)


def flat_scales(call: Call) -> Call:
    """The call with scales of rows in one dimension, those of blocks in two."""
    names = ("x_scale", "weight_scale")
    scales = {name: getattr(call, name) for name in names}
    if spec.has_block_scales(call.x, call.weight, **scales):
        x_scale, weight_scale = scales.values()
        scales["x_scale"] = x_scale.reshape(-1, x_scale.shape[-1])
        scales["weight_scale"] = weight_scale.contiguous()
    else:
        scales = {name: scale.reshape(-1).contiguous() for name, scale in scales.items()}
    return Call(**{**call.__dict__, **scales})


def call_fp8_backend(backend: Any, call: Call) -> Any:
    """A plug-in knows no scales of blocks: with them the reference runs."""
    from tiercel.ops.linear import reference

    call = flat_scales(call)
    if spec.has_block_scales(call.x, call.weight, call.x_scale, call.weight_scale):
        values = spec.FP8_LINEAR.values(call)
        activation = values.pop("activation")
        return reference.fp8_linear(*values.values(), activation=activation)
    return FP8_LINEAR.run(backend, call)


def _make_weight_grad(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    n, k, tokens = (case.sizes[name] for name in "NKP")
    generator = torch.Generator().manual_seed(seed)

    def quantized(rows: int) -> tuple[Any, Any]:
        values = torch.randn(rows, tokens, generator=generator)
        if case.values == "strided":
            values = torch.cat([values, values], dim=1)
        scale = torch.rand(-(-tokens // 128), rows, generator=generator) / 16
        return values.to(torch.float8_e4m3fn).to(device)[:, :tokens], scale.to(device)

    (grad, grad_scale), (x, x_scale) = quantized(n), quantized(k)
    dtype = getattr(torch, case.options["dtype"])
    return {"grad": grad, "x": x, "grad_scale": grad_scale, "x_scale": x_scale, "dtype": dtype}


def _weight_grad_sums(arguments: dict[str, Any]) -> Any:
    rows, columns = (
        values.float().abs() * scale.t().repeat_interleave(128, 1)[:, : values.shape[1]]
        for values, scale in (
            (arguments["grad"], arguments["grad_scale"]),
            (arguments["x"], arguments["x_scale"]),
        )
    )
    return rows @ columns.T


def _weight_case(n: int, k: int, tokens: int, dtype: str, values: str = "random") -> Case:
    return Case({"N": n, "K": k, "P": tokens}, *_FP8, {"dtype": dtype}, values)


FP8_LINEAR_WEIGHT_GRAD = Contract.of(
    "linear",
    spec.FP8_LINEAR_WEIGHT_GRAD,
    sums=_weight_grad_sums,
    cases=(
        _weight_case(64, 64, 128, "bfloat16"),
        _weight_case(1, 8, 16, "float32"),
        _weight_case(200, 136, 400, "float32"),
        _weight_case(65, 264, 272, "bfloat16", "strided"),
        _weight_case(64, 64, 0, "bfloat16"),
    ),
    timing={
        "cpu": _weight_case(64, 256, 256, "bfloat16"),
        "cuda": _weight_case(4096, 1024, 4096, "float32"),
    },
    make=_make_weight_grad,
)


_WIDE = "float32 weight, "


def _make_training(case: Case, device: str, seed: int) -> dict[str, Any]:
    values = case.values.removeprefix(_WIDE)
    made: dict[str, Any] = _maker(1)(replace(case, values=values), device, seed)
    if values != case.values:
        made["weight"] = made["weight"].float()
    return made


def _training_sums(arguments: dict[str, Any]) -> Any:
    return arguments["x"].float().abs() @ arguments["weight"].float().abs().T


def _training_case(rows: int, n: int, k: int, values: str = "bias") -> Case:
    return Case({"M": rows, "N": n, "K": k}, "bfloat16", {}, values)


FP8_LINEAR_TRAINING = Contract.of(
    "linear",
    spec.FP8_LINEAR_TRAINING.without("weight_grad"),
    sums=_training_sums,
    cases=(
        _training_case(16, 64, 64),
        _training_case(130, 208, 400, _WIDE + "bias"),
        _training_case(65, 128, 128, "no bias"),
        _training_case(65, 128, 128, _WIDE + "strided"),
        _training_case(0, 64, 64),
    ),
    timing={
        "cpu": _training_case(64, 256, 256),
        "cuda": _training_case(4096, 4096, 1024),
    },
    make=_make_training,
)

CONTRACTS = (LINEAR_ACT, GATED_LINEAR, FP8_LINEAR, FP8_LINEAR_WEIGHT_GRAD, FP8_LINEAR_TRAINING)

# Made of other operators.
WITHOUT_CONTRACT = ["fused_mlp"]

# Names in tiercel.plugins.types.
ALIASES = {
    "Features": "linear_act.x",
    "Weight": "linear_act.weight",
    "Bias": "linear_act.bias",
    "Activated": "linear_act.out",
}
