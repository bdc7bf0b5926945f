# SPDX-License-Identifier: Apache-2.0
"""To 8-bit and 4-bit floats and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiercel.ops.quant.cases import fp8_out
from tiercel.workbench.bench.compiled import compiled_for
from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.peers.vllm import operator


def fp8_quantize(x: Any, granularity: str, scale: Any) -> tuple[Any, Any]:
    from tiercel.ops.quant import reference as ref

    return ref.fp8_quantize(x, granularity, scale=scale)


def nvfp4_quantize(x: Any, global_scale: Any) -> tuple[Any, Any]:
    """To bytes: torch.compile has no way to make 4-bit floats of them."""
    import torch

    from tiercel.ops.quant import reference as ref

    groups = x.float().unflatten(-1, (x.shape[-1] // 16, 16))
    wanted = groups.abs().amax(-1) / 6.0
    if global_scale is not None:
        wanted = wanted / global_scale
    scale = wanted.clamp(max=448.0).to(torch.float8_e4m3fn)
    total = scale.float() if global_scale is None else scale.float() * global_scale
    inverse = torch.where(total == 0, 0.0, total.reciprocal())
    value = groups.abs() * inverse[..., None]
    codes = (groups < 0).to(torch.uint8) * 8
    for halfway, up in ref._HALFWAY:
        codes = codes + (value >= halfway if up else value > halfway)
    codes = codes.flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale


def nvfp4_dequantize(packed: Any, scale: Any, global_scale: Any, table: Any, dtype: Any) -> Any:
    import torch

    total = scale.float() if global_scale is None else scale.float() * global_scale
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    values = table[codes.long()].unflatten(-1, (scale.shape[-1], 16))
    return (values * total[..., None]).flatten(-2).to(dtype)


def _fp8(compiled: bool) -> Callable[[Any, dict[str, Any]], Launch]:
    def prepare(case: Any, inputs: dict[str, Any]) -> Launch:
        function = compiled_for(case, fp8_quantize) if compiled else fp8_quantize
        scale = inputs["scale"] if case["scales"] == "static" else None
        arguments = (inputs["x"], inputs["granularity"], scale)
        return Launch(run=lambda: tuple(function(*arguments)))

    return prepare


def fp8_quantize_transpose(x: Any, granularity: str) -> tuple[Any, ...]:
    from tiercel.ops.quant import reference as ref

    return ref.fp8_quantize_transpose(x, granularity)


def _fp8_transpose(compiled: bool) -> Callable[[Any, dict[str, Any]], Launch]:
    def prepare(case: Any, inputs: dict[str, Any]) -> Launch:
        function = fp8_quantize_transpose
        if compiled:
            function = compiled_for(case, fp8_quantize_transpose)
        return Launch(run=lambda: tuple(function(inputs["x"], case["scales"])))

    return prepare


def _nvfp4(compiled: bool) -> Callable[[Any, dict[str, Any]], Launch]:
    def prepare(case: Any, inputs: dict[str, Any]) -> Launch:
        import torch

        function = compiled_for(case, nvfp4_quantize) if compiled else nvfp4_quantize
        arguments = (inputs["x"], inputs["global_scale"])

        def run() -> tuple[Any, Any]:
            packed, scale = function(*arguments)
            return packed.view(torch.float4_e2m1fn_x2), scale

        return Launch(run)

    return prepare


def _from_nvfp4(compiled: bool) -> Callable[[Any, dict[str, Any]], Launch]:
    def prepare(case: Any, inputs: dict[str, Any]) -> Launch:
        import torch

        from tiercel.ops.quant import reference as ref

        function = compiled_for(case, nvfp4_dequantize) if compiled else nvfp4_dequantize
        packed = inputs["q"].view(torch.uint8)
        table = torch.tensor([*ref._E2M1, *(-v for v in ref._E2M1)], device=packed.device)
        arguments = (packed, inputs["scale"], inputs["global_scale"], table, inputs["x"].dtype)
        return Launch(run=lambda: (function(*arguments),))

    return prepare


def _vllm(case: Any, inputs: dict[str, Any]) -> Launch:
    x = inputs["x"]
    q, scale = fp8_out(case, inputs)
    kind = case["scales"]
    if kind == "static":
        function = operator("_C", "static_scaled_fp8_quant")
        extra = [None] * (len(function.default._schema.arguments) - 3)
        given = scale.view(1)

        def run() -> tuple[Any, Any]:
            function(q, x, given, *extra)
            return q, scale

    elif kind == "tensor":
        function, flat = operator("_C", "dynamic_scaled_fp8_quant"), scale.view(1)

        def run() -> tuple[Any, Any]:
            flat.zero_()  # it takes the largest of what is there
            function(q, x, flat)
            return q, scale

    elif kind == "row":
        function = operator("_C", "dynamic_per_token_scaled_fp8_quant")

        def run() -> tuple[Any, Any]:
            function(q, x, scale, None)
            return q, scale

    elif kind == "1x128" and case["K"] % 128 == 0:
        function = operator("_C", "per_token_group_fp8_quant")
        extra = [False] * (len(function.default._schema.arguments) - 8)

        def run() -> tuple[Any, Any]:
            function(x, q, scale, 128, 1e-10, -448.0, 448.0, False, *extra)
            return q, scale

    else:
        raise Unsupported("it has no such granularity")
    return Launch(run)


ADAPTERS = {
    "torch": {
        "fp8_quantize": _fp8(False),
        "fp8_quantize_transpose": _fp8_transpose(False),
        "nvfp4_dequantize": _from_nvfp4(False),
        "nvfp4_quantize": _nvfp4(False),
    },
    "torch.compile": {
        "fp8_quantize": _fp8(True),
        "fp8_quantize_transpose": _fp8_transpose(True),
        "nvfp4_dequantize": _from_nvfp4(True),
        "nvfp4_quantize": _nvfp4(True),
    },
    "vllm": {"fp8_quantize": _vllm},
}
