# SPDX-License-Identifier: Apache-2.0
"""The gradients of norms: threads, rows and stages per block, clusters, rows to prefetch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from tiercel.workbench.tune.hardware import REGISTERS_PER_SM, Needs
from tiercel.workbench.tune.ops import Tunable
from tiercel.workbench.tune.problem import Candidate, Problem

# Vectors and rows per thread that kernels exist for, by the bytes of an element.
_VECTORS_AND_ROWS = {2: ((2, 1), (3, 1), (4, 1), (2, 2)), 4: ((2, 1), (4, 1), (8, 1))}
_CLUSTERS, _STAGES, _PREFETCH = (1, 2, 4, 8), (2, 3, 4, 5, 6), (0, 3)
_TEAMS = (1, 2, 3, 4, 5, 6, 8, 12)
_QUICK_STAGES, _QUICK_TEAMS = (2, 4), (1, 2, 4, 8)
_MOST_THREADS, _FEWEST_THREADS = 512, 96
_FEWEST_VECTORS = 384  # per block of a cluster
_STATIC_SHARED = 10240  # at most
_LEAST_SHARED = 116 * 1024  # keeps a second block off the multiprocessor
_ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4}


def _team_threads(vectors: int, each: int) -> int:
    """Whole warps that share a row, `each` vectors per thread."""
    return -(-vectors // (32 * each)) * 32


def _parts(problem: Problem, cluster: int) -> int:
    """Vectors of a row per block."""
    vectors = -(-problem["N"] * _ELEMENT[problem.dtype] // 16)
    return -(-vectors // cluster)


def candidates(problem: Problem, tokens: int, quick: bool, compiled: bool) -> list[Candidate]:
    """At most two in five lanes of a row idle, three warps or more per block."""
    found: list[Candidate] = []
    stages_of = _QUICK_STAGES if quick else _STAGES
    shapes = _VECTORS_AND_ROWS[_ELEMENT[problem.dtype]]
    for (each, rows), cluster in itertools.product(shapes, _CLUSTERS):
        part = _parts(problem, cluster)
        team = _team_threads(part, each)
        if team > _MOST_THREADS or (cluster > 1 and part < _FEWEST_VECTORS):
            continue
        if (team > 32 and team * each > 1.6 * part) or (each * rows <= 2 and team > 32):
            continue
        teams = [1] if cluster > 1 else _QUICK_TEAMS if quick else _TEAMS
        blocks = [team * n for n in teams if _FEWEST_THREADS <= team * n <= _MOST_THREADS]
        even = (False,) if quick else (False, True)
        for choice in itertools.product(blocks, stages_of, _PREFETCH, even):
            if choice[1] >= rows:
                names = ("threads", "stages", "prefetch_rows", "even")
                shape = {"vectors": each, "rows": rows, "cluster": cluster}
                found.append(shape | dict(zip(names, choice, strict=True)) | {"pairs": False})
    return found


def needs(problem: Problem, tokens: int, c: Candidate) -> Needs:
    part = _parts(problem, c["cluster"])
    team = _team_threads(part, c["vectors"])
    teams = 1 if c["cluster"] > 1 else c["threads"] // team
    ring = c["stages"] * teams * part * 16 * 2
    return Needs(
        teams * team,
        max(ring, _LEAST_SHARED) + _STATIC_SHARED,
        REGISTERS_PER_SM // _MOST_THREADS,
        cluster=c["cluster"],
        most_threads=_MOST_THREADS,
    )


def config(c: Candidate) -> dict[str, Any]:
    names = ("vectors", "rows", "cluster", "threads", "stages", "prefetch_rows", "even", "pairs")
    return {name: c[name] for name in names}


def _invalid(problem: Problem, tokens: int) -> str | None:
    elements = 16 // _ELEMENT[problem.dtype]
    if problem["N"] % elements:
        return f"N must be a multiple of {elements}"
    if problem["N"] > 131072:
        return f"at most 131072 columns are supported, got {problem['N']}"
    return None


def _case(op: str, problem: Problem, tokens: int) -> Any:
    from tiercel.workbench.bench.cases import Case

    params = {"M": tokens, "N": problem["N"], "weight": "same"}
    params |= {"bias": op == "layer_norm", "residual": False}
    return Case("norm", f"{op}_backward", problem.dtype, params)


def _launch(
    op: str, problem: Problem, candidate: Candidate | None
) -> Callable[[Any, Any], tuple[Any, ...]]:
    import torch

    from tiercel import _C
    from tiercel.ops.norm.cases import EPS

    plan, backward = getattr(_C, f"{op}_backward_plan"), getattr(_C, f"{op}_backward")
    more = () if candidate is None else (tuple(config(candidate).values()),)

    def launch(inputs: Any, out: Any) -> tuple[Any, ...]:
        tensors = (inputs["x"], inputs["weight"], inputs["grad"], None)
        parameters = [inputs["weight"], inputs["bias"]]
        grad_x = torch.empty_like(inputs["x"])
        parts = plan(*tensors, grad_x, None, None, None, EPS, *more)["parts"]
        grads = [None if p is None else torch.empty_like(p) for p in parameters]
        workspace = grad_x.new_empty((2, parts, problem["N"]), dtype=torch.float32)
        backward(*tensors, grad_x, *grads, workspace, EPS, *more)
        return (grad_x, *(grad for grad in grads if grad is not None))

    return launch


def _tunable(op: str) -> Tunable:
    return Tunable(
        op=f"{op}_backward",
        command=f"{op.replace('_', '-')}-backward",
        sizes=("N",),
        problems=((1024,), (2048,), (4096,), (5120,), (8192,), (16384,)),
        tokens=(2048, 4096, 16384),
        dtypes=("bfloat16", "float16", "float32"),
        invalid=_invalid,
        candidates=candidates,
        needs=needs,
        precompiled=lambda candidate: True,
        case=partial(_case, op),
        launch=partial(_launch, op),
        config=config,
    )


RMS_NORM, LAYER_NORM = _tunable("rms_norm"), _tunable("layer_norm")
