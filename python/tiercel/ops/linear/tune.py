# SPDX-License-Identifier: Apache-2.0
"""linear_act: tiles, turns, clusters and stages of the persistent kernel; splits of the other."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiercel
from tiercel.workbench.tune.hardware import SHARED_PER_BLOCK, Needs
from tiercel.workbench.tune.ops import Tunable
from tiercel.workbench.tune.problem import Candidate, Problem

_SOURCE = Path(tiercel.__file__).parent / "jit" / "kernels" / "linear" / "linear_cute.py"
_TILE_K, _WARPGROUP, _PIECE = 64, 128, 64  # as in kernels/linear/linear_layouts_cute.py
_GROUPS = (0, 1, 2, 4, 8, 16, 32)  # the swizzle: 0 is the launcher's own
_SPLITS = (1, 2, 3, 4, 5, 6, 7, 8)
_QUICK_SPLITS = (1, 2, 4, 8)
# Beyond, reading w again for every tile of rows costs more than the persistent kernel's start.
_FEW_ROWS, _MANY_ROWS = 512, 64
# Registers beside the sums: addresses, descriptors, the epilogue's values.
_BESIDE_SUMS = 56


@functools.cache
def shapes() -> dict[str, tuple[tuple[Any, ...], ...]]:
    """The precompiled shapes, from the list that they are compiled from."""
    found = {}
    for node in ast.parse(_SOURCE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("_LARGE", "_SMALL"):
                found[name] = ast.literal_eval(node.value)
    return found


def _large(shape: tuple[Any, ...], group: int) -> Candidate:
    names = ("tile_m", "tile_n", "pingpong", "cluster", "stages", "epi_stages")
    return dict(zip(names, shape, strict=True)) | {"split_k": False, "splits": 1, "group": group}


def _small(shape: tuple[int, ...], splits: int) -> Candidate:
    tile_m, tile_n, stages = shape
    fixed = {"pingpong": False, "cluster": 1, "stages": stages, "epi_stages": 0}
    tile = {"tile_m": tile_m, "tile_n": tile_n}
    return tile | fixed | {"split_k": True, "splits": splits, "group": 0}


def _shared(c: Candidate) -> int:
    stage = (c["tile_m"] + c["tile_n"]) * _TILE_K * 2 + 16
    ring = c["stages"] * stage
    if c["split_k"]:
        ring += 8  # the barrier of partial sums
    else:
        ring += 2 * (c["epi_stages"] * _PIECE * _PIECE * 2 + c["tile_n"] * 4)
    return -(-ring // 1024) * 1024


def _most_stages(shape: dict[str, Any]) -> int:
    stages = 1
    while _shared(shape | {"stages": stages + 1}) <= SHARED_PER_BLOCK:
        stages += 1
    return stages


def _compiled_shapes(quick: bool) -> tuple[list[tuple[Any, ...]], list[tuple[int, ...]]]:
    """Shapes of kernels that the wheel lacks; what of them cannot fit is pruned by its needs."""
    large, small = [], []
    for pingpong in (False, True):
        for tile_m in (64, 128) if pingpong else (128,):
            for tile_n in (64, 128, 192, 256):
                for cluster in (1, 2, 4):
                    for epi in (1,) if quick else (1, 2):
                        base = _large((tile_m, tile_n, pingpong, cluster, 0, epi), 0)
                        most = _most_stages(dict(base))
                        for stages in (most,) if quick else (most, most - 1):
                            large.append((tile_m, tile_n, pingpong, cluster, stages, epi))
    for tile_m in (64, 128):
        for tile_n in (32, 64, 96, 128, 192):
            most = _most_stages(dict(_small((tile_m, tile_n, 0), 1)))
            for stages in {most, most // 2} if quick else {most, most - 1, most // 2, most // 3}:
                small.append((tile_m, tile_n, stages))
    have = shapes()
    return (
        [shape for shape in large if shape not in have["_LARGE"]],
        sorted(shape for shape in small if shape not in have["_SMALL"] and shape[2] > 1),
    )


def candidates(problem: Problem, tokens: int, quick: bool, compiled: bool) -> list[Candidate]:
    found: list[Candidate] = []
    k_tiles = -(-problem["K"] // _TILE_K)
    few, many = tokens <= _FEW_ROWS, tokens >= _MANY_ROWS
    if few:
        splits = [s for s in (_QUICK_SPLITS if quick else _SPLITS) if s <= k_tiles]
        found += [_small(shape, s) for shape in shapes()["_SMALL"] for s in splits]
    if many:
        for shape in shapes()["_LARGE"]:
            rows = -(-tokens // (shape[0] * shape[3]))  # of clusters
            groups = [g for g in ((0, 4, 16) if quick else _GROUPS) if g == 0 or g <= rows]
            found += [_large(shape, g) for g in groups]
    if compiled:  # each takes seconds to compile: their launches are varied less
        large, small = _compiled_shapes(quick)
        splits = [s for s in _QUICK_SPLITS if s <= k_tiles]
        found += [_small(shape, s) for shape in small for s in splits if few]
        found += [_large(shape, 0) for shape in large if many]
    return found


def needs(problem: Problem, tokens: int, c: Candidate) -> Needs:
    rows = c["tile_m"] if c["pingpong"] or c["split_k"] else c["tile_m"] // 2
    sums = rows * c["tile_n"] // _WARPGROUP
    if c["split_k"]:
        registers = min(sums + _BESIDE_SUMS, 255)
        return Needs(
            2 * _WARPGROUP, _shared(c), registers, sums + _BESIDE_SUMS, cluster=c["splits"]
        )
    # Launched with an equal share; the loader hands most of its own to the multipliers.
    most = 240 if c["pingpong"] else 232
    return Needs(
        3 * _WARPGROUP, _shared(c), 168, sums + _BESIDE_SUMS, most=most, cluster=c["cluster"]
    )


def _shape_of(c: Candidate) -> tuple[Any, ...]:
    if c["split_k"]:
        return c["tile_m"], c["tile_n"], c["stages"]
    names = ("tile_m", "tile_n", "pingpong", "cluster", "stages", "epi_stages")
    return tuple(c[name] for name in names)


def precompiled(c: Candidate) -> bool:
    return _shape_of(c) in shapes()["_SMALL" if c["split_k"] else "_LARGE"]


def config(c: Candidate) -> dict[str, Any]:
    return {
        name: c[name] for name in ("tile_m", "tile_n", "pingpong", "split_k", "splits", "group")
    }


def _invalid(problem: Problem, tokens: int) -> str | None:
    if problem["N"] % 8 or problem["K"] % 8:
        return "N and K must be multiples of 8"
    return None


def _case(problem: Problem, tokens: int) -> Any:
    from tiercel.workbench.bench.cases import Case

    params = {"M": tokens, "N": problem["N"], "K": problem["K"], "act": "gelu", "bias": True}
    params["residual"] = False
    return Case("linear", "linear_act", problem.dtype, params)


_GELU = 3  # as the launcher counts; the tiles that are best for it are for all


def _launch(problem: Problem, candidate: Candidate | None) -> Callable[[Any, Any], None]:
    from tiercel import _C

    if candidate is None or precompiled(candidate):
        more = () if candidate is None else (tuple(config(candidate).values()),)
        return lambda i, out: _C.linear_act(
            i["x"], i["weight"], i["bias"], None, out, None, _GELU, *more
        )
    return _compiled_launch(problem, candidate)


def _compiled_launch(problem: Problem, c: Candidate) -> Callable[[Any, Any], None]:
    from tiercel.jit.cute_kernel import variant

    names = ("tile_m", "tile_n", "pingpong", "split_k", "cluster", "stages", "epi_stages")
    dtype = {"bfloat16": "bf16", "float16": "fp16"}[problem.dtype]
    spec = {name: c[name] for name in names}
    kernel = variant("linear", "linear_tune_cute", dtype=dtype, act="gelu", **spec)

    def launch(inputs: Any, out: Any) -> None:
        m = out.shape[0]
        place = _place(problem, m, c)
        boxes = {"x": (place["rows"], _TILE_K)} if c["split_k"] else None
        tensors = {"x": inputs["x"], "w": inputs["weight"], "bias": inputs["bias"], "y": out}
        none = {"residual": None, "x_scale": None, "w_scale": None}
        none |= {"sums": None if c["split_k"] else out, "save": 0, "x_step": 0, "w_step": 0}
        kernel(boxes=boxes, **tensors, **none, m=m, n=problem["N"], k=problem["K"], **place)

    return launch


def _place(problem: Problem, m: int, c: Candidate) -> dict[str, int]:
    """The launch shape; linear_act_choose.cc computes the same for precompiled kernels."""
    import torch

    columns = -(-problem["N"] // c["tile_n"])
    if c["split_k"]:
        row_tiles = -(-m // c["tile_m"])
        rows = (-(-m // row_tiles) + 7) // 8 * 8
        blocks = row_tiles * columns * c["splits"]
        return {"rows": rows, "splits": c["splits"], "blocks": blocks, "group": 0}
    step = c["tile_m"] * c["cluster"]
    tiles = -(-m // step) * columns
    clusters = torch.cuda.get_device_properties(0).multi_processor_count // c["cluster"]
    group = c["group"] or max(1, 2048 // step)
    return {"rows": 0, "splits": 1, "blocks": min(tiles, clusters) * c["cluster"], "group": group}


TUNABLE = Tunable(
    op="linear_act",
    command="linear",
    sizes=("N", "K"),
    problems=((4096, 4096), (14336, 4096), (4096, 14336)),
    tokens=(1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    dtypes=("bfloat16", "float16"),
    invalid=_invalid,
    candidates=candidates,
    needs=needs,
    precompiled=precompiled,
    case=_case,
    launch=_launch,
    config=config,
)
