# SPDX-License-Identifier: Apache-2.0
"""Gated linear layers, the MLP of two layers, a linear layer's backward, and float8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiercel.ops.linear.cases import activate
from tiercel.workbench.bench.compiled import compiled_for
from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.peers.vllm import operator

Inputs = dict[str, Any]


def gated_linear(x: Any, weight: Any, bias: Any, act: str) -> tuple[Any, ...]:
    import torch

    gate, up = torch.nn.functional.linear(x, weight, bias).chunk(2, dim=-1)
    return (activate(act, gate) * up,)


def fused_mlp(x: Any, up: Any, down: Any, residual: Any, act: str, gated: bool) -> tuple[Any, ...]:
    from torch.nn import functional

    if gated:
        (hidden,) = gated_linear(x, up, None, act)
    else:
        hidden = activate(act, functional.linear(x, up))
    result = functional.linear(hidden, down)
    return (result if residual is None else result + residual,)


def linear_act_backward(
    x: Any, weight: Any, sums: Any, grad: Any, act: str, bias: bool
) -> tuple[Any, ...]:
    """The operations of torch.nn.functional's autograd, from the tensors that its forward saves."""
    import torch

    aten = torch.ops.aten
    if act == "relu":
        grad = aten.threshold_backward(grad, sums, 0)
    elif act == "silu":
        grad = aten.silu_backward(grad, sums)
    elif act != "none":
        approximate = "tanh" if act == "gelu_tanh" else "none"
        grad = aten.gelu_backward(grad, sums, approximate=approximate)
    found = (grad @ weight, grad.t() @ x)
    return (*found, grad.sum(0)) if bias else found


def fp8_linear(
    x: Any, weight: Any, x_scale: Any, weight_scale: Any, bias: Any, act: str
) -> tuple[Any, ...]:
    """With sums as the tensor cores have them, as ours."""
    import torch

    if x_scale.shape[1] > 1:
        return _fp8_blocks(x, weight, x_scale, weight_scale, bias, act)
    options: dict[str, Any] = {"bias": bias, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    sums = torch._scaled_mm(x, weight.t(), x_scale, weight_scale.t(), **options)
    return (activate(act, sums),)


def _fp8_blocks(
    x: Any, weight: Any, x_scale: Any, weight_scale: Any, bias: Any, act: str
) -> tuple[Any, ...]:
    """Its scales have to lie the other way round in memory (see _torch_fp8)."""
    import torch
    from torch.nn import functional

    kinds: Any = functional.ScalingType
    scales = (x_scale, kinds.BlockWise1x128, weight_scale.t(), kinds.BlockWise128x128)
    sums = functional.scaled_mm(x, weight.t(), *scales, bias=bias, output_dtype=torch.bfloat16)
    return (activate(act, sums),)


def _torch_fp8(case: Any, inputs: Inputs) -> Launch:
    """Blocks: scales of x by columns, those of the weight padded to a multiple of 4 along K."""
    import torch

    if case["blocks"]:
        if case["M"] % 4:
            raise Unsupported("it takes M that is a multiple of 4 with scales of blocks")
        of_weight = inputs["weight_scale"]
        inputs = {
            **inputs,
            "x_scale": inputs["x_scale"].t().contiguous().t(),
            "weight_scale": torch.nn.functional.pad(of_weight, (0, -of_weight.shape[1] % 4)),
        }
    return _torch("fp8_linear")(case, inputs)


def _fp8_output(case: Any, x: Any) -> Any:
    import torch

    return x.new_empty(case["M"], case["N"], dtype=torch.bfloat16)


def _vllm_fp8(case: Any, inputs: Inputs) -> Launch:
    """Its CUTLASS products; scales of blocks lie as for _torch_fp8."""
    x, weight, x_scale, weight_scale, bias = inputs.values()
    if case["blocks"]:
        if case["M"] % 4:
            raise Unsupported("it takes M that is a multiple of 4 with scales of blocks")
        if bias is not None:
            raise Unsupported("it takes no bias with scales of blocks")
        x_scale = x_scale.t().contiguous().t()
    function = operator("_C", "cutlass_scaled_mm")
    out = _fp8_output(case, x)

    def run() -> tuple[Any, ...]:
        function(out, x, weight.t(), x_scale, weight_scale.t(), bias)
        return (activate(case["act"], out),)

    return Launch(run)


def _deepgemm_fp8(case: Any, inputs: Inputs) -> Launch:
    """Its kernels on Hopper read a column of scales after the other."""
    from tiercel.workbench.bench.peers import deepgemm

    if not case["blocks"] or case["bias"] or case["act"] != "none":
        raise Unsupported("it takes scales of blocks, no bias and no activation")
    module: Any = deepgemm.module()
    x, weight, x_scale, weight_scale, _ = inputs.values()
    scale = x_scale.mT.contiguous().mT
    out = _fp8_output(case, x)

    def run() -> tuple[Any, ...]:
        module.fp8_gemm_nt((x, scale), (weight, weight_scale), out)
        return (out,)

    return Launch(run)


def _deepgemm_gated(case: Any, inputs: Inputs) -> Launch:
    """Its product, then vLLM's gate."""
    from tiercel.workbench.bench.peers import deepgemm

    if not case["blocks"] or case["bias"] or case["act"] != "silu":
        raise Unsupported("it takes scales of blocks, no bias, and vLLM's gate is SiLU")
    module, gate = deepgemm.module(), operator("_C", "silu_and_mul")
    x, weight, x_scale, weight_scale, _ = inputs.values()
    scale = x_scale.mT.contiguous().mT
    out = _fp8_output(case, x)
    both = out.new_empty(case["M"], 2 * case["N"])

    def run() -> tuple[Any, ...]:
        module.fp8_gemm_nt((x, scale), (weight, weight_scale), both)
        gate(out, both)
        return (out,)

    return Launch(run)


def _arguments(op: str, case: Any, inputs: Inputs) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if op == "gated_linear" and case["blocks"]:
        raise Unsupported("it has no gated product with scales of blocks")
    function, names, options = {
        "gated_linear": (gated_linear, ("x", "weight", "bias"), ("act",)),
        "fused_mlp": (fused_mlp, ("x", "up", "down", "residual"), ("act", "gated")),
        "linear_act_backward": (
            linear_act_backward,
            ("x", "weight", "sums", "grad"),
            ("act", "bias"),
        ),
        "fp8_linear": (
            fp8_linear,
            ("x", "weight", "x_scale", "weight_scale", "bias"),
            ("act",),
        ),
    }[op]
    return function, (*(inputs[name] for name in names), *(case[name] for name in options))


def _torch(op: str) -> Callable[[Any, Inputs], Launch]:
    def prepare(case: Any, inputs: Inputs) -> Launch:
        function, arguments = _arguments(op, case, inputs)
        return Launch(run=lambda: function(*arguments))

    return prepare


def _compiled(op: str) -> Callable[[Any, Inputs], Launch]:
    def prepare(case: Any, inputs: Inputs) -> Launch:
        function, arguments = _arguments(op, case, inputs)
        compiled = compiled_for(case, function)
        return Launch(run=lambda: compiled(*arguments))

    return prepare


_OPS = ("gated_linear", "fused_mlp", "linear_act_backward", "fp8_linear")
ADAPTERS = {
    "deepgemm": {"fp8_linear": _deepgemm_fp8, "gated_linear": _deepgemm_gated},
    "torch": {**{op: _torch(op) for op in _OPS}, "fp8_linear": _torch_fp8},
    "torch.compile": {op: _compiled(op) for op in _OPS},
    "vllm": {"fp8_linear": _vllm_fp8},
}
