# SPDX-License-Identifier: Apache-2.0
"""Smoke cases of topk_softmax, and the contract of its plug-ins."""

from __future__ import annotations

from typing import Any

from tiercel.ops.routing.spec import TOPK_SOFTMAX
from tiercel.plugins.contract import Case, Contract

_OPTIONS: dict[str, Any] = {"softmax_first": True, "renormalize": False, "indices_dtype": "int32"}


def _case(
    rows: int, experts: int, k: int, dtype: str, values: str = "random", **options: Any
) -> Case:
    return Case({"T": rows, "E": experts, "k": k}, dtype, options, values)


_CASES = (
    _case(1, 8, 2, "float32"),
    _case(33, 64, 8, "bfloat16"),
    _case(33, 64, 8, "float16", renormalize=True),
    _case(33, 64, 6, "float32", softmax_first=False),
    _case(7, 60, 4, "float32", indices_dtype="int64"),
    _case(129, 127, 5, "bfloat16"),
    _case(64, 256, 8, "bfloat16", renormalize=True),
    _case(5, 512, 16, "float32"),
    _case(3, 1, 1, "float32"),
    _case(0, 64, 8, "bfloat16"),
    _case(40, 32, 8, "bfloat16", "ties"),
    _case(40, 32, 8, "float32", "strided"),
    _case(40, 32, 4, "float32", "special"),
)


def _make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    rows, experts = case.sizes["T"], case.sizes["E"]
    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, experts, generator=generator)
    if case.values == "ties":
        scores = torch.randint(-2, 3, (rows, experts), generator=generator).float()
    elif case.values == "special":  # one in ten; the rest of the row stays as it is
        special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
        chosen = special[torch.randint(len(special), (rows, experts), generator=generator)]
        scores = torch.where(torch.rand(rows, experts, generator=generator) < 0.1, chosen, scores)
    scores = scores.to(device=device, dtype=getattr(torch, case.dtype))
    if case.values == "strided":
        scores = torch.stack([scores, -scores], dim=-1)[..., 0]
    options = _OPTIONS | dict(case.options)
    options["indices_dtype"] = getattr(torch, options["indices_dtype"])
    return {"scores": scores, "k": case.sizes["k"], **options}


CONTRACTS = (
    Contract.of(
        "routing",
        TOPK_SOFTMAX,
        cases=_CASES,
        timing={
            "cpu": _case(512, 128, 8, "float32", renormalize=True),
            "cuda": _case(8192, 128, 8, "bfloat16", renormalize=True),
        },
        make=_make,
    ),
)
