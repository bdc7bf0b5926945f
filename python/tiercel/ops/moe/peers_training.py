# SPDX-License-Identifier: Apache-2.0
"""Experts' MLPs with gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from tiercel.ops.moe.cases_training import memory, step
from tiercel.ops.moe.peers import activation
from tiercel.workbench.bench.launch import Launch, Unsupported


def by_groups(
    activate: Callable[[Any], Any], x: Any, w_up: Any, w_down: Any, weights: Any, ids: Any
) -> Any:
    """torch's grouped product over tokens that are sorted by expert; its result is reordered by
    the inverse of the order, so that each token's rows are neighbours in the sum."""
    import torch

    grouped: Any = torch._grouped_mm
    tokens, k = ids.shape
    flat = ids.flatten()
    order = flat.argsort()
    counts = torch.zeros(w_up.shape[0], dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, flat.long(), torch.ones_like(flat))
    ends = counts.cumsum(0, dtype=torch.int32)
    pre = grouped(x[order // k], w_up.transpose(1, 2), offs=ends)
    outer = grouped(activate(pre), w_down.transpose(1, 2), offs=ends)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=x.device)
    rows = outer[inverse].view(tokens, k, -1)
    return (rows * weights.to(x.dtype)[..., None]).sum(1)


def _torch(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    if not hasattr(torch, "_grouped_mm") or case.dtype != "bfloat16":
        raise Unsupported("torch's grouped product is for bfloat16")
    function = partial(by_groups, activation(case))
    return Launch(lambda: step(function, inputs), details=memory(function, inputs))


def by_sonicmoe(x: Any, w_up: Any, w_down: Any, weights: Any, ids: Any) -> Any:
    """Its layer behind the router, of weights in the order of ours."""
    import torch

    sonic: Any = importlib.import_module("sonicmoe.functional")
    silu = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
    (tokens, k), experts = ids.shape, len(w_up)
    rows, scattered, gathered, counts = (
        torch.empty(size, dtype=torch.int32, device=x.device)
        for size in (tokens * k, tokens * k, tokens * k, experts)
    )
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=x.device)
    sonic.TC_topk_router_metadata_triton(ids, experts, counts, offsets, rows, scattered, gathered)
    places = (rows, scattered, gathered, None, False)
    up, down = w_up.permute(1, 2, 0), w_down.permute(1, 2, 0)
    inner, pre = sonic._UpProjection.apply(
        x, up, None, offsets, tokens * k, k, *places, silu, False, True
    )
    return sonic._DownProjection.apply(
        inner, pre, down, None, weights, offsets, tokens, k, *places, silu
    )


def _sonicmoe(case: Any, inputs: dict[str, Any]) -> Launch:
    if case["act"] != "silu":
        raise Unsupported("it is called with SwiGLU here")
    _do_not_tune()
    step(by_sonicmoe, inputs)  # compiles
    details = {"tuned": False, **memory(by_sonicmoe, inputs)}
    return Launch(lambda: step(by_sonicmoe, inputs), details=details)


def _do_not_tune() -> None:
    """Leaves quack's products one configuration, its own default: with a choice of 40 it compiles
    and times each of them for each product and size, for minutes."""
    products: Any = importlib.import_module("quack.gemm_interface")
    default = importlib.import_module("quack.autotuner").AutotuneConfig(config=None)
    for name in ("gemm_tuned", "gemm_gated_tuned", "gemm_dgated_tuned"):
        getattr(products, name).configs = [default]


ADAPTERS = {
    "sonicmoe": {"fused_moe_with_gradient": _sonicmoe},
    "torch": {"fused_moe_with_gradient": _torch},
}
