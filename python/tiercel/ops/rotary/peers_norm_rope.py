# SPDX-License-Identifier: Apache-2.0
"""Norms and rotary embedding of queries and keys, forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any

from tiercel.ops.rotary.cases import rotated
from tiercel.ops.rotary.cases_norm_rope import step
from tiercel.workbench.bench.compiled import compiled_for
from tiercel.workbench.bench.launch import Launch


def separate(
    interleaved: bool, q: Any, k: Any, positions: Any, angles: Any, q_weight: Any, k_weight: Any
) -> Any:
    """Norms and rotation in torch's operations."""
    import torch

    q, k = (
        torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return rotated(positions, q, k, angles, interleaved)


def ours_apart(
    interleaved: bool, q: Any, k: Any, positions: Any, angles: Any, q_weight: Any, k_weight: Any
) -> Any:
    import tiercel

    q, k = (tiercel.rms_norm(x, w, eps=1e-6) for x, w in ((q, q_weight), (k, k_weight)))
    return tiercel.rotary_embedding(positions, q, k, angles, interleaved=interleaved)


def _torch(case: Any, inputs: dict[str, Any]) -> Launch:
    function = partial(separate, case["style"] == "interleaved")
    return Launch(lambda: step(function, inputs))


def _compiled(case: Any, inputs: dict[str, Any]) -> Launch:
    function = partial(compiled_for(case, separate), case["style"] == "interleaved")
    return Launch(lambda: step(function, inputs))


def _separate(case: Any, inputs: dict[str, Any]) -> Launch:
    function = partial(ours_apart, case["style"] == "interleaved")
    return Launch(lambda: step(function, inputs))


ADAPTERS = {
    "separate": {"qk_norm_rope_with_gradient": _separate},
    "torch": {"qk_norm_rope_with_gradient": _torch},
    "torch.compile": {"qk_norm_rope_with_gradient": _compiled},
}
