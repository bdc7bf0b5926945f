# SPDX-License-Identifier: Apache-2.0
"""The block size and tiles of fused_moe: tuned for the problem, or by a heuristic. Needs no torch:
the tuner reads it, too."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

from tiercel import _C

if TYPE_CHECKING:
    from torch import Tensor


class MoeTiles(NamedTuple):
    """Slots of a routing block; rows of weights a tile and blocks a cluster of each half, None for
    the launcher's own."""

    block: int
    up: tuple[int, int] | None
    down: tuple[int, int] | None


# Everything in one launch, without blocks: for few tokens and float8 weights.
SINGLE_LAUNCH = MoeTiles(0, None, None)
_SINGLE_LAUNCH_BYTES = 300_000_000  # of weights: beyond, what a launch costs is little beside them


_MOST_TOKENS = 4  # beyond, kernels that several tokens share weights in are faster
_MOST_IDS = 32  # kFewIds of few_tokens_kernels.h: T * k
_ROOM = 200_000  # bytes of shared memory, for the ring and the rows it is multiplied with


def fits_single_launch(tokens: int, k: int, hidden: int, inner: int) -> bool:
    """For float8 weights. The launcher (kernels/moe/few_tokens.cc) knows exactly; this errs to
    False."""
    if tokens > _MOST_TOKENS or not 0 < tokens * k <= _MOST_IDS or hidden % 128 or inner % 128:
        return False
    ring = 8 * max(8 * hidden, 16 * inner)  # a unit for each group of warps, at least
    return ring + tokens * max(hidden, k * inner) <= _ROOM


def tiles(block: int, half: str, dtype: str) -> tuple[tuple[int, int], ...]:
    """(tile, cluster) of the kernels that there are: those of kernels/moe/moe_cute.py."""
    if block == 64:
        wide_only = half == "up" and dtype == "float8_e4m3fn"
        return ((128, 1),) if wide_only else ((128, 1), (64, 1))
    return ((256, 1),)


def prefers_single_launch(tokens: int, k: int, w_down: Tensor) -> bool:
    """True if several launches would be much of the time, and one takes these sizes."""
    experts, hidden, inner = w_down.shape
    if w_down.element_size() > 1 or not fits_single_launch(tokens, k, hidden, inner):
        return False
    return min(tokens * k, experts) * 3 * hidden * inner <= _SINGLE_LAUNCH_BYTES


def block_size(elements: int, experts: int) -> int:
    """For many tokens, as many rows as a multiprocessor takes at a time; for few, half of that,
    since most are padding."""
    return 128 if elements > 56 * max(experts, 1) else 64


# kMoeRoutedIds and kMoeRoutedExperts of moe_mlp.h.
_ROUTED_IDS, _ROUTED_EXPERTS = 1024, 512


def routed_by_kernels(elements: int, experts: int, block: int, expert_map: Tensor | None) -> bool:
    """True if each block of threads sorts all ids by itself, instead of a launch before."""
    few = elements <= _ROUTED_IDS and experts <= _ROUTED_EXPERTS
    return few and block == 64 and expert_map is None


# The number on an H100 SXM or H200.
_MULTIPROCESSORS = 132


def _tile(blocks: float, rows: float) -> tuple[int, int]:
    """For few tokens: narrower tiles where they leave fewer multiprocessors without work at last.
    `rows`: of the result, in tiles of 64."""
    narrow, wide = (
        math.ceil(blocks * math.ceil(rows / tiles) / _MULTIPROCESSORS) * tiles for tiles in (1, 2)
    )
    return (64, 1) if narrow < 0.9 * wide else (128, 1)


@functools.lru_cache(maxsize=4096)
def heuristic(
    tokens: int,
    k: int,
    experts: int,
    hidden: int,
    inner: int,
    float8: bool = False,
) -> MoeTiles:
    elements = tokens * k
    block = block_size(elements, experts)
    if block == 128:
        return MoeTiles(block, None, None)
    if float8:  # whose tiles of weights have half of the bytes; measured
        return MoeTiles(block, (128, 1), (128, 1))
    # Experts that tokens come to, where all are as likely: a block each.
    active = experts * (1 - (1 - min(k / max(experts, 1), 1)) ** tokens)
    return MoeTiles(block, *(_tile(active, n) for n in (inner / 32, hidden / 64)))


def from_config(config: tuple[int, ...]) -> MoeTiles:
    """From a configuration's fields, in the order of tuned.OPS."""
    block, up_tile, up_cluster, down_tile, down_cluster = config
    if block == 0:
        return SINGLE_LAUNCH
    return MoeTiles(block, (up_tile, up_cluster), (down_tile, down_cluster))


@functools.lru_cache(maxsize=1024)
def has_kernels(config: tuple[int, ...], dtype: str) -> bool:
    """True if the wheel has a configuration's kernels, or if it asks for the single launch."""
    block, *halves = config
    if block == 0:
        return True
    up, down = (tuple(halves[at : at + 2]) for at in (0, 2))
    if block not in (64, 128):
        return False
    return up in tiles(block, "up", dtype) and down in tiles(block, "down", dtype)


def choose(
    w_down: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    block_scaled: bool,
    allow_single_launch: bool = True,
) -> MoeTiles:
    """`allow_single_launch`: SINGLE_LAUNCH is a choice."""
    tokens, k = topk_ids.shape
    experts, hidden, inner = w_down.shape
    # The tiles' sums have one order; the single launch has another.
    allow_single_launch = allow_single_launch and not _C.batch_invariant()
    float8 = w_down.element_size() == 1
    if expert_map is not None:  # how many tokens come to these experts is another question
        return MoeTiles(block_size(tokens * k, experts), None, None)
    device, dtype = w_down.get_device(), str(w_down.dtype).removeprefix("torch.")
    sizes = (experts, k, hidden, inner)
    if not block_scaled:  # whose kernels are others
        config = _C.fused_moe_config(device, (dtype, *sizes), tokens)
        if config is not None and not has_kernels(config, dtype):  # a file may say anything
            config = None
        choice = None if config is None else from_config(config)
        # Tuned for another number of tokens, a single launch may not take these.
        fits = allow_single_launch and float8 and fits_single_launch(tokens, k, hidden, inner)
        if choice is not None and (choice is not SINGLE_LAUNCH or fits):
            return choice
    if allow_single_launch and prefers_single_launch(tokens, k, w_down):
        return SINGLE_LAUNCH
    return heuristic(tokens, k, experts, hidden, inner, float8)
