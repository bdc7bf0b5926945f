# SPDX-License-Identifier: Apache-2.0
"""nvfp4_linear: how rows and K are cut up among warps, blocks and clusters, stages in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiercel.tune.hardware import Needs
from tiercel.tune.ops import Tunable
from tiercel.tune.problem import Candidate, Problem

_SLICE = 256  # values of K, as in kernels/gemv/nvfp4_linear_kernels.h
_STAGE_BYTES = 16 * (_SLICE // 2 + _SLICE // 16 + 1)
_OWN_SHARED = 1024  # the kernel's own, at most
_FEATURES = 16  # of a tile
_WARPS = (1, 2, 4, 6, 7, 8, 10, 12, 14, 15, 16, 20)
_PARTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, 16)
_CLUSTERS = (1, 2, 4, 8)


def candidates(problem: Problem, tokens: int, quick: bool, compiled: bool) -> list[Candidate]:
    slices = -(-problem["K"] // _SLICE)
    found: list[Candidate] = []
    for cluster in _CLUSTERS:
        of_block = -(-slices // cluster)
        if cluster > 1 and of_block * (cluster // 2) >= slices:
            continue  # half of a cluster has all of K
        for stages in (2,) if quick or problem["K"] % _SLICE else (2, 3):
            for warps in _WARPS:
                for parts in _PARTS:
                    if warps % parts == 0 and parts <= max(of_block, 1):
                        cut = {"cluster": cluster, "tiles": warps // parts}
                        found.append(cut | {"parts": parts, "stages": stages})
    return found


def needs(problem: Problem, tokens: int, c: Candidate) -> Needs:
    """Of a block that has the sums of one turn of its rows; the launcher gives it more."""
    warps = c["tiles"] * c["parts"]
    share = c["parts"] * c["cluster"]  # of K, together
    passes = -(-problem["K"] // (_SLICE * share))
    sums = (64 if tokens == 1 else 512 if tokens <= 8 else 1024) * (
        share + warps * (2 if passes > 1 else 1)
    )
    shared = warps * c["stages"] * _STAGE_BYTES + sums + _OWN_SHARED
    # Compiled for at most 512 threads a block: so many registers each.
    return Needs(warps * 32, shared, 128, cluster=c["cluster"], most_threads=512)


def _invalid(problem: Problem, tokens: int) -> str | None:
    if problem["K"] % 64:
        return "K must be a multiple of 64"
    if tokens > 16:
        return f"at most 16 tokens are supported, got {tokens}"
    return None


def _case(problem: Problem, tokens: int) -> Any:
    from tiercel.bench.cases import Case

    params = {"T": tokens, "N": problem["N"], "K": problem["K"]}
    return Case("gemv", "nvfp4_linear", "nvfp4", params)


def _launch(problem: Problem, candidate: Candidate | None) -> Callable[[Any, Any], None]:
    from tiercel import _C

    more = () if candidate is None else (tuple(config(candidate).values()),)
    return lambda i, out: _C.nvfp4_linear(i["x"], i["weight"], i["scale"], None, out, *more)


def config(c: Candidate) -> dict[str, Any]:
    return {name: c[name] for name in ("cluster", "tiles", "parts", "stages")}


TUNABLE = Tunable(
    op="nvfp4_linear",
    command="nvfp4-linear",
    sizes=("N", "K"),
    problems=((4096, 4096), (14336, 4096), (4096, 14336), (7168, 16384)),
    tokens=(1, 2, 4, 8, 16),
    dtypes=("float4_e2m1fn_x2",),
    invalid=_invalid,
    candidates=candidates,
    needs=needs,
    precompiled=lambda candidate: True,
    case=_case,
    launch=_launch,
    config=config,
)
