# SPDX-License-Identifier: Apache-2.0
"""fused_moe: slots of the routing's blocks, tiles and clusters of both halves; for few tokens and
float8 also a single launch, which is zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiercel.ops.moe.tiling import fits_single_launch, from_config, tiles
from tiercel.workbench.tune.hardware import Needs
from tiercel.workbench.tune.ops import Tunable
from tiercel.workbench.tune.problem import Candidate, Problem

# kFewThreads and, at most, kFewMaxShared of kernels/moe/few_tokens_kernels.h.
_FEW_THREADS, _FEW_SHARED = 544, 226 * 1024
_ONE_LAUNCH: Candidate = dict.fromkeys(
    ("block_size", "up_tile", "up_cluster", "down_tile", "down_cluster"), 0
)
_STAGES = {128: 8, 64: 12, 256: 4}
_ROW, _PIECE, _WARPGROUP = 128, 64, 128  # as in kernels/linear/linear_layouts_cute.py
# Elements an expert: beyond, blocks of 64 are many; below, blocks of 128 are padding.
_MOST_OF_64, _LEAST_OF_128 = 128, 8


def candidates(problem: Problem, tokens: int, quick: bool, compiled: bool) -> list[Candidate]:
    each = tokens * problem["k"] / problem["E"]
    one_launch = fits_single_launch(tokens, problem["k"], problem["H"], problem["I"])
    found: list[Candidate] = []
    if problem.dtype == "float8_e4m3fn" and one_launch:
        found.append(dict(_ONE_LAUNCH))
    for block in (64, 128):
        if each > _MOST_OF_64 if block == 64 else each < _LEAST_OF_128:
            continue
        downs = tiles(block, "down", problem.dtype)
        for up in tiles(block, "up", problem.dtype):
            for down in (up,) if quick and up in downs else downs:
                found.append(
                    {
                        "block_size": block,
                        "up_tile": up[0],
                        "up_cluster": up[1],
                        "down_tile": down[0],
                        "down_cluster": down[1],
                    }
                )
    return found


def half_needs(problem: Problem, c: Candidate, half: str) -> Needs:
    block, tile = c["block_size"], c[f"{half}_tile"]
    width = tile // 2 if half == "up" else tile
    pieces = 2 * (2 if width > _PIECE and block > 64 else 1)  # of the warpgroups that multiply
    # Stages of rows, or of the next tiles and of scales.
    float8 = problem.dtype == "float8_e4m3fn"
    of_rows, of_tiles = 1024 + 2 * 528 + 2 + 4 * float8, 12 + 2 * tile * float8
    lists = 4 * (of_rows if block == 64 else of_tiles)
    ring = _STAGES[tile] * ((block + tile) * _ROW + 16) + 64
    shared = -(-(ring + pieces * _PIECE * _ROW + lists) // 1024) * 1024
    busiest = 64 * tile // _WARPGROUP + 56
    cluster = c[f"{half}_cluster"]
    return Needs(3 * _WARPGROUP, shared, 168, busiest, most=224, cluster=cluster)


def needs(problem: Problem, tokens: int, c: Candidate) -> Needs:
    """The needs of the half that takes more."""
    if c["block_size"] == 0:
        return Needs(_FEW_THREADS, _FEW_SHARED, 96)
    return max((half_needs(problem, c, half) for half in ("up", "down")), key=lambda n: n.shared)


def _invalid(problem: Problem, tokens: int) -> str | None:
    of = 16 if problem.dtype == "float8_e4m3fn" else 8
    if problem["H"] % of or problem["I"] % of:
        return f"H and I must be multiples of {of}"
    if problem["k"] > problem["E"]:
        return "k must not exceed E"
    if problem["E"] > 512:
        return f"at most 512 experts are supported, got {problem['E']}"
    return None


def _case(problem: Problem, tokens: int) -> Any:
    from tiercel.workbench.bench.cases import Case

    float8 = problem.dtype == "float8_e4m3fn"
    params = {"T": tokens, **dict(problem.sizes), "act": "silu"}
    params["weights"] = "float8" if float8 else "same"
    return Case("moe", "fused_moe", "bfloat16" if float8 else problem.dtype, params)


def _launch(problem: Problem, candidate: Candidate | None) -> Callable[[Any, Any], Any]:
    from tiercel.ops.moe.fused import run

    choice = None if candidate is None else from_config(tuple(candidate.values()))

    def launch(inputs: Any, out: Any) -> Any:
        x, w_up, w_down, weights, ids, *scales = inputs.values()
        up_scale, down_scale = scales or (None, None)
        both = ((w_up, up_scale), (w_down, down_scale))
        return run(x, both, weights, ids, "silu", None, choice)

    return launch


TUNABLE = Tunable(
    op="fused_moe",
    command="moe",
    sizes=("E", "k", "H", "I"),
    problems=(
        (64, 8, 2048, 1024),  # OLMoE
        (128, 8, 2048, 768),  # Qwen3 30B
        (8, 2, 4096, 14336),  # Mixtral 8x7B
        (128, 8, 4096, 1536),  # Qwen3 235B
        (60, 4, 2048, 1408),  # Qwen1.5 MoE
        (64, 6, 2048, 1408),  # DeepSeek V2 Lite
        (16, 2, 4096, 6400),  # Phi 3.5 MoE
        (32, 4, 2880, 2880),  # GPT-OSS 20B
        (128, 4, 2880, 2880),  # GPT-OSS 120B
        (256, 8, 7168, 2048),  # DeepSeek V3
    ),
    tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    dtypes=("bfloat16", "float16", "float8_e4m3fn"),
    invalid=_invalid,
    candidates=candidates,
    needs=needs,
    precompiled=lambda candidate: True,
    case=_case,
    launch=_launch,
    config=dict,
)
