# SPDX-License-Identifier: Apache-2.0
"""Smoke cases of the routing ops, and the contracts of their plug-ins."""

from __future__ import annotations

from typing import Any

from tiercel.ops.routing.spec import (
    MOE_ALIGN_BLOCK_SIZE,
    MOE_SUM,
    TOPK_SOFTMAX,
    TOPK_SOFTMAX_ALIGN,
)
from tiercel.plugins.contract import Case, Contract

# topk_softmax

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


# moe_align_block_size


def _align_case(rows: int, k: int, experts: int, block: int, dtype: str, **options: Any) -> Case:
    sizes = {"T": rows, "k": k, "num_experts": experts, "block_size": block}
    return Case(sizes, dtype, {}, options.get("values", "random"))


# `values`: random; mapped = every second expert is here; local = and others' tokens are left out;
# stray = some ids are of no expert; one = all tokens chose the same expert.
_ALIGN_CASES = (
    _align_case(1, 2, 8, 16, "int32"),
    _align_case(16, 8, 64, 16, "int32"),
    _align_case(33, 6, 60, 48, "int64"),
    _align_case(129, 8, 256, 128, "int32"),
    _align_case(2000, 8, 512, 64, "int32"),
    _align_case(100, 8, 64, 32, "int32", values="mapped"),
    _align_case(100, 8, 64, 32, "int32", values="local"),
    _align_case(50, 4, 32, 16, "int64", values="stray"),
    _align_case(300, 4, 16, 64, "int32", values="one"),
    _align_case(0, 8, 64, 16, "int32"),
)


def _every_second(experts: int, device: str) -> Any:
    import torch

    here = torch.full((experts,), -1, dtype=torch.int32)
    here[1::2] = torch.arange(len(here[1::2]), dtype=torch.int32)
    return here.to(device)


def _make_align(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    rows, k, experts, block = (case.sizes[n] for n in ("T", "k", "num_experts", "block_size"))
    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, experts, generator=generator).topk(k).indices
    if case.values == "one":
        ids = torch.full_like(ids, experts - 1)
    elif case.values == "stray":
        ids = ids + torch.randint(-1, 2, ids.shape, generator=generator) * (experts // 2)
    mapped = case.values in ("mapped", "local")
    return {
        "topk_ids": ids.to(device=device, dtype=getattr(torch, case.dtype)),
        "block_size": block,
        "num_experts": experts,
        "expert_map": _every_second(experts, device) if mapped else None,
        "pad_sorted_ids": False,
        "ignore_invalid_experts": case.values == "local",
    }


# topk_softmax_align


def _fused_case(rows: int, experts: int, k: int, block: int, dtype: str, **options: Any) -> Case:
    sizes = {"T": rows, "E": experts, "k": k, "block_size": block}
    values = options.pop("values", "random")
    return Case(sizes, dtype, options, values)


_FUSED_CASES = (
    _fused_case(1, 64, 8, 16, "bfloat16"),
    _fused_case(17, 60, 4, 16, "float32", renormalize=True),
    _fused_case(128, 256, 8, 64, "bfloat16", softmax_first=False),
    _fused_case(128, 512, 16, 128, "float16"),
    _fused_case(300, 128, 8, 32, "bfloat16"),
    _fused_case(0, 64, 8, 16, "bfloat16"),
    _fused_case(20, 32, 8, 16, "float32", values="strided"),
)


def _make_fused(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(case.sizes["T"], case.sizes["E"], generator=generator)
    if case.values == "strided":
        scores = scores.t().contiguous().t()
    options = {"softmax_first": True, "renormalize": False} | dict(case.options)
    return {
        "scores": scores.to(device=device, dtype=getattr(torch, case.dtype)),
        "k": case.sizes["k"],
        "block_size": case.sizes["block_size"],
        "expert_map": None,
        **options,
        "indices_dtype": torch.int32,
        "pad_sorted_ids": False,
        "ignore_invalid_experts": False,
    }


# moe_sum


def _sum_case(rows: int, k: int, columns: int, dtype: str, values: str = "weights") -> Case:
    return Case({"T": rows, "k": k, "H": columns}, dtype, {}, values)


_SUM_CASES = (
    _sum_case(1, 8, 256, "bfloat16"),
    _sum_case(33, 6, 136, "float16"),
    _sum_case(20, 2, 64, "float32"),
    _sum_case(20, 3, 65, "bfloat16"),
    _sum_case(100, 8, 512, "bfloat16", "no weights"),
    _sum_case(0, 8, 64, "bfloat16"),
    _sum_case(17, 4, 96, "bfloat16", "strided"),
)


def _make_sum(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    rows, k, columns = (case.sizes[name] for name in "TkH")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, columns, generator=generator)
    x = x.to(device=device, dtype=getattr(torch, case.dtype))
    if case.values == "strided":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    weights = torch.rand(rows, k, generator=generator).to(device)
    return {"x": x, "weights": None if case.values == "no weights" else weights}


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
    Contract.of(
        "routing",
        MOE_ALIGN_BLOCK_SIZE,
        cases=_ALIGN_CASES,
        timing={
            "cpu": _align_case(512, 8, 64, 64, "int32"),
            "cuda": _align_case(8192, 8, 256, 128, "int32"),
        },
        make=_make_align,
    ),
    Contract.of(
        "routing",
        MOE_SUM,
        cases=_SUM_CASES,
        timing={
            "cpu": _sum_case(64, 8, 512, "bfloat16"),
            "cuda": _sum_case(4096, 8, 4096, "bfloat16"),
        },
        make=_make_sum,
    ),
    Contract.of(
        "routing",
        TOPK_SOFTMAX_ALIGN,
        cases=_FUSED_CASES,
        timing={
            "cpu": _fused_case(64, 64, 8, 16, "float32"),
            "cuda": _fused_case(128, 128, 8, 16, "bfloat16"),
        },
        make=_make_fused,
    ),
)

# Names in tiercel.plugins.types.
ALIASES = {
    "Scores": "topk_softmax.scores",
    "Weights": "topk_softmax.weights",
    "Indices": "topk_softmax.indices",
    "ChosenExperts": "moe_align_block_size.topk_ids",
    "ExpertMap": "moe_align_block_size.expert_map",
    "ScoresMap": "topk_softmax_align.expert_map",
    "SortedTokens": "moe_align_block_size.sorted_token_ids",
    "BlockExperts": "moe_align_block_size.expert_ids",
    "NumSlots": "moe_align_block_size.num_tokens_post_padded",
    "ExpertOutputs": "moe_sum.x",
    "ExpertWeights": "moe_sum.weights",
    "SummedOutputs": "moe_sum.out",
}
