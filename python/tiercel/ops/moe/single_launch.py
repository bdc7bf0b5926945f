# SPDX-License-Identifier: Apache-2.0
"""fused_moe of few tokens with float8 weights in one launch, whose blocks wait for each other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tiercel import _C
from tiercel.ops.moe.halves import INDEX

Weights = tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def _arguments(
    x: Tensor, weights: Weights, topk_weights: Tensor, topk_ids: Tensor, activation: str
) -> tuple[Any, ...]:
    """As the launcher takes them; the result is the last but one."""
    (w_up, up_scale), (w_down, down_scale) = weights
    out = x.new_empty(x.shape)
    scales = (up_scale, down_scale)
    return (x, w_up, w_down, *scales, topk_weights, topk_ids, out, INDEX[activation])


def run(*given: Any) -> Tensor:
    """Raises NotImplementedError, and launches nothing, where the kernel does not take these."""
    arguments = _arguments(*given)
    _C.fused_moe_few_tokens(*arguments)
    result: Tensor = arguments[-2]
    return result


def plan(*given: Any) -> dict[str, Any]:
    return dict(_C.fused_moe_few_tokens_plan(*_arguments(*given)))
