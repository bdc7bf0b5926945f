# SPDX-License-Identifier: Apache-2.0
"""nvfp4_linear: how rows and K are cut up among warps, blocks and clusters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiercel.workbench.tune.hardware import Needs
from tiercel.workbench.tune.ops import Tunable
from tiercel.workbench.tune.problem import Candidate, Problem

_LINE = 256  # values of K, as in kernels/gemv/nvfp4_linear_kernels.h
_FEATURES = 16  # of a tile
_WARPS = (1, 2, 4, 6, 7, 8, 10, 12, 14, 15, 16, 18, 19, 20, 21, 24, 28)
_PARTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, 16)
_CLUSTERS = (1, 2, 4, 8)


def _most_threads(tokens: int) -> int:
    return 640 if tokens == 1 else 896 if tokens <= 8 else 768


def candidates(problem: Problem, tokens: int, quick: bool, compiled: bool) -> list[Candidate]:
    lines = -(-problem["K"] // _LINE)
    found: list[Candidate] = []
    for cluster in _CLUSTERS:
        of_block = -(-lines // cluster)
        if cluster > 1 and of_block * (cluster // 2) >= lines:
            continue  # half of a cluster has all of K
        for warps in _WARPS:
            for parts in _PARTS:
                if warps % parts == 0 and parts <= max(of_block, 1):
                    cut = {"cluster": cluster, "tiles": warps // parts}
                    found.append(cut | {"parts": parts, "stages": 2})
    return _least_work(problem, found) if quick else found


def _least_work(problem: Problem, every: list[Candidate]) -> list[Candidate]:
    """Those that leave a multiprocessor little more work than the best one."""
    work = [_work(problem, c) for c in every]
    return [c for c, lines in zip(every, work, strict=True) if lines <= 1.5 * min(work)]


def _work(problem: Problem, c: Candidate) -> int:
    """Lines of 16 rows for one of four schedulers, of one block a multiprocessor."""
    clusters = {1: 132, 2: 66, 4: 30, 8: 14}[c["cluster"]]  # that run at once
    strips = -(-problem["N"] // (_FEATURES * c["tiles"]))
    turns = -(-strips // clusters)
    passes = -(-problem["K"] // (_LINE * c["parts"] * c["cluster"]))
    return turns * passes * -(-c["tiles"] * c["parts"] // 4)


def needs(problem: Problem, tokens: int, c: Candidate) -> Needs:
    """The needs of a block that has the sums of one turn of its rows, and x for one line of each
    part or for all of them; the launcher gives it more."""
    warps = c["tiles"] * c["parts"]
    share = c["parts"] * c["cluster"]  # of K, together
    passes = -(-problem["K"] // (_LINE * share))
    line = 528 if tokens == 1 else 4224 * (-(-tokens // 8))
    sums = 64 if tokens == 1 else 512 * (-(-tokens // 8))
    least = warps * c["stages"] * 16 * (_LINE // 2 + 1) + share * sums
    least += 1024  # the launcher takes 226 of 227 KiB
    least += 192 if tokens == 1 else 0
    whole = passes * c["parts"] * line + warps * sums
    sections = c["parts"] * line + 2 * warps * sums
    most_threads = _most_threads(tokens)
    return Needs(
        warps * 32,
        least + min(whole, sections),
        65536 // most_threads // 8 * 8,
        cluster=c["cluster"],
        most_threads=most_threads,
    )


def _invalid(problem: Problem, tokens: int) -> str | None:
    if problem["K"] % 64:
        return "K must be a multiple of 64"
    if tokens > 16:
        return f"at most 16 tokens are supported, got {tokens}"
    return None


def _case(problem: Problem, tokens: int) -> Any:
    from tiercel.workbench.bench.cases import Case

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
