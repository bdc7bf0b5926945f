# SPDX-License-Identifier: Apache-2.0
"""How fused_moe's work is cut up: as was tuned for the problem, or by a heuristic."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tiercel import _tuned

_NAME = "fused_moe"


class Choice(NamedTuple):
    """Slots of a routing block; rows of weights a tile and blocks a cluster of each half, None for
    the launcher's own."""

    block: int
    up: tuple[int, int] | None
    down: tuple[int, int] | None


def block_size(elements: int, experts: int) -> int:
    """For many tokens, as many rows as a multiprocessor takes at a time; for few, half of that,
    since most are padding."""
    return 128 if elements > 24 * max(experts, 1) else 64


def of_config(config: tuple[int, ...]) -> Choice:
    """Of a configuration's fields, in the order of _tuned.OPS."""
    block, up_tile, up_cluster, down_tile, down_cluster = config
    return Choice(block, (up_tile, up_cluster), (down_tile, down_cluster))


def choose(w_down: Tensor, topk_ids: Tensor, expert_map: Tensor | None) -> Choice:
    tokens, k = topk_ids.shape
    experts, hidden, inner = w_down.shape
    heuristic = Choice(block_size(tokens * k, experts), None, None)
    if expert_map is not None:  # how many tokens come to these experts is another question
        return heuristic
    device, dtype = w_down.get_device(), str(w_down.dtype).removeprefix("torch.")
    sizes = (experts, k, hidden, inner)
    config = _tuned.FUSED_MOE.find(
        device, (dtype, *sizes), tokens, lambda: _tuned.hint(_NAME, device, dtype, *sizes)
    )
    return heuristic if config is None else of_config(config)
