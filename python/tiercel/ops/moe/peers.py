# SPDX-License-Identifier: Apache-2.0
"""Experts' MLPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiercel.workbench.bench.launch import Launch, Unsupported


def activation(case: Any) -> Callable[[Any], Any]:
    from torch.nn import functional

    if case["act"] == "gelu_residual":
        raise Unsupported("it has no such activation")
    function = getattr(functional, case["act"])

    def activate(sums: Any) -> Any:
        a, b = sums.chunk(2, dim=-1)
        return function(a) * b

    return activate


def _torch(case: Any, inputs: dict[str, Any]) -> Launch:
    """torch's grouped product over tokens that are sorted by expert."""
    import torch

    grouped: Any = getattr(torch, "_grouped_mm", None)
    if grouped is None or case.dtype != "bfloat16" or case["weights"] != "same":
        raise Unsupported("torch's grouped product is for bfloat16")
    x, w_up, w_down, weights, ids = inputs.values()
    activate, k = activation(case), case["k"]
    up, down = w_up.transpose(1, 2), w_down.transpose(1, 2)

    def run() -> tuple[Any, ...]:
        flat = ids.flatten().long()
        order = flat.argsort()
        counts = torch.zeros(case["E"], dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = order // k
        inner = activate(grouped(x[rows], up, offs=ends))
        outer = grouped(inner, down, offs=ends) * weights.flatten()[order, None]
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return (out.index_add_(0, rows, outer.float()).to(x.dtype),)

    return Launch(run)


def _vllm(case: Any, inputs: dict[str, Any]) -> Launch:
    """Its Triton kernels with the configuration that it has for this problem, or its default."""
    if case["act"] not in ("silu", "gelu"):
        raise Unsupported("it has no such activation")
    from tiercel.workbench.bench.vllm_experts import fused_experts

    x, w_up, w_down, weights, ids, *scales = inputs.values()
    experts = fused_experts(x, w_up, w_down, weights, ids, case["act"], *scales)
    return Launch(lambda: (experts(),))


def _grouped_torch(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    grouped: Any = getattr(torch, "_grouped_mm", None)
    if grouped is None or case.dtype != "bfloat16":
        raise Unsupported("torch's grouped product is for bfloat16")
    x, w, offsets = inputs.values()
    columns, ends = w.transpose(1, 2), offsets[1:]
    return Launch(lambda: (grouped(x, columns, offs=ends),))


def _grouped_deepgemm(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    from tiercel.workbench.bench.peers import deepgemm

    if case.dtype != "bfloat16" or not case["aligned"]:
        raise Unsupported("it takes bfloat16, in groups that begin at multiples of 128 rows")
    x, w, offsets = inputs.values()
    groups = torch.arange(len(w), dtype=torch.int32, device=w.device)
    of_rows = groups.repeat_interleave(offsets.diff())
    out = x.new_empty(x.shape[0], w.shape[1])
    multiply: Any = deepgemm.module().m_grouped_bf16_gemm_nt_contiguous

    def run() -> tuple[Any, ...]:
        multiply(x, w, out, of_rows)
        return (out,)

    return Launch(run)


def _grouped_backward_torch(case: Any, inputs: dict[str, Any]) -> Launch:
    """The two products that its own derivative makes."""
    import torch

    grouped: Any = getattr(torch, "_grouped_mm", None)
    if grouped is None or case.dtype != "bfloat16":
        raise Unsupported("torch's grouped product is for bfloat16")
    grad, x, w, offsets = inputs.values()
    across, ends = grad.t(), offsets[1:]
    return Launch(lambda: (grouped(grad, w, offs=ends), grouped(across, x, offs=ends)))


ADAPTERS = {
    "deepgemm": {"grouped_gemm": _grouped_deepgemm},
    "torch": {
        "fused_moe": _torch,
        "grouped_gemm": _grouped_torch,
        "grouped_gemm_backward": _grouped_backward_torch,
    },
    "vllm": {"fused_moe": _vllm},
}
