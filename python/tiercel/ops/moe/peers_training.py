# SPDX-License-Identifier: Apache-2.0
"""Experts' MLPs with gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tiercel.ops.moe.cases_training import step
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
    return Launch(lambda: step(partial(by_groups, activation(case)), inputs))


ADAPTERS = {"torch": {"fused_moe_with_gradient": _torch}}
