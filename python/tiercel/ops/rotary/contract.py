# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding, and new keys and values into a paged cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiercel.core.spec import Tensor
from tiercel.ops.rotary import spec
from tiercel.plugins.contract import Case, Contract


def _case(
    tokens: int,
    heads: int,
    kv_heads: int,
    size: int,
    rotated: int,
    elements: str,
    positions: str = "int64",
    interleaved: bool = False,
) -> Case:
    sizes = {"T": tokens, "H": heads, "Hk": kv_heads, "D": size, "R": rotated, "P": 64}
    return Case(sizes, positions, {"elements": elements, "interleaved": interleaved})


_CASES = (
    _case(1, 1, 1, 16, 16, "float32"),
    _case(33, 8, 2, 128, 128, "bfloat16", "int32"),
    _case(33, 8, 2, 128, 128, "float16", interleaved=True),
    _case(17, 4, 1, 64, 32, "bfloat16"),
    _case(17, 4, 1, 80, 20, "bfloat16", interleaved=True),
    _case(5, 3, 3, 10, 6, "float32"),
    _case(0, 8, 2, 64, 64, "bfloat16"),
)


def _make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    tokens, heads, kv_heads, size, rotated, rows = (
        case.sizes[name] for name in ("T", "H", "Hk", "D", "R", "P")
    )
    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.options["elements"])
    q, k = (
        torch.randn(tokens, count, size, generator=generator).to(device=device, dtype=dtype)
        for count in (heads, kv_heads)
    )
    positions = torch.randint(rows, (tokens,), generator=generator)
    angles = torch.rand(rows, rotated // 2, generator=generator) * 6.2832
    return {
        "positions": positions.to(device=device, dtype=getattr(torch, case.dtype)),
        "q": q,
        "k": k,
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=1).to(device),
        "interleaved": case.options["interleaved"],
    }


ROTARY_EMBEDDING = Contract.of(
    "rotary",
    spec.ROTARY_EMBEDDING,
    cases=_CASES,
    timing={
        "cpu": _case(256, 8, 2, 128, 128, "bfloat16"),
        "cuda": _case(4096, 32, 8, 128, 128, "bfloat16"),
    },
    make=_make,
)


def _kv_case(
    tokens: int, heads: int, size: int, blocks: int, places: int, dtype: str, values: str = "random"
) -> Case:
    return Case(
        {"T": tokens, "H": heads, "D": size, "blocks": blocks, "places": places}, dtype, {}, values
    )


def _make_kv(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    tokens, heads, size = (case.sizes[name] for name in "THD")
    shape = (case.sizes["blocks"], case.sizes["places"], heads, size)
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    key, value = random(tokens, heads, size), random(tokens, heads, size)
    if case.values == "strided":  # as slices of one product
        key, value = torch.cat([key, value], dim=1).split(heads, dim=1)
    slots = torch.randperm(shape[0] * shape[1], generator=generator)[:tokens]
    slots = torch.where(torch.rand(tokens, generator=generator) < 0.1, -1, slots)
    return {
        "key": key,
        "value": value,
        "key_cache": random(*shape),
        "value_cache": random(*shape),
        "slots": slots.to(device),
        "key_scale": None,
        "value_scale": None,
    }


# A backend returns new caches, which the operator copies into those that it writes to.
_NEW_CACHES = spec.KV_CACHE_WRITE.changed(
    results=[
        Tensor(f"new_{each.name}", each.dims, "key_cache")
        for each in spec.KV_CACHE_WRITE.tensors
        if each.written
    ],
    arguments=tuple(replace(each, written=False) for each in spec.KV_CACHE_WRITE.tensors),
)

KV_CACHE_WRITE = Contract.of(
    "rotary",
    _NEW_CACHES,
    cases=(
        _kv_case(1, 1, 8, 2, 4, "bfloat16"),
        _kv_case(33, 8, 128, 5, 16, "bfloat16"),
        _kv_case(33, 2, 64, 40, 1, "float16"),
        _kv_case(20, 3, 20, 2, 16, "bfloat16"),
        _kv_case(20, 4, 64, 2, 16, "float16", "strided"),
        _kv_case(0, 4, 64, 2, 16, "bfloat16"),
    ),
    timing={
        "cpu": _kv_case(64, 8, 128, 8, 16, "bfloat16"),
        "cuda": _kv_case(4096, 8, 128, 512, 16, "bfloat16"),
    },
    make=_make_kv,
    mutates=("key_cache", "value_cache"),
)


def _fused_case(
    tokens: int,
    heads: tuple[int, int],
    size: int,
    rotated: int,
    dtype: str,
    values: str = "random",
    **options: Any,
) -> Case:
    sizes = {"T": tokens, "H": heads[0], "Hk": heads[1], "D": size, "R": rotated, "P": 64}
    sizes |= {"blocks": tokens // 8 + 1, "places": 16}
    return Case(sizes, dtype, {"interleaved": False, "normed": True} | options, values)


def _make_fused(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    sizes = case.sizes
    size = sizes["D"]
    kv = _make_kv(replace(case, sizes=sizes | {"H": sizes["Hk"]}), device, seed)
    turned = replace(case, dtype="int64", options=case.options | {"elements": case.dtype})
    rotary = _make(turned, device, seed)
    q_weight, k_weight = (
        torch.rand(size, generator=torch.Generator().manual_seed(seed)).to(device) + number
        for number in (0.5, 1.0)
    )
    q, positions, sections = rotary["q"], rotary["positions"], case.options.get("sections")
    if sections is not None:
        positions = torch.stack([positions, positions.flip(0), positions // 2])
    if case.values == "strided":
        q = torch.cat([q, -q], dim=1)[:, : sizes["H"]]
    return {
        "q": q,
        "k": kv["key"],
        "v": kv["value"],
        "q_out": torch.zeros_like(q, memory_format=torch.contiguous_format),
        "key_cache": kv["key_cache"],
        "value_cache": kv["value_cache"],
        "slots": kv["slots"],
        "positions": positions,
        "cos_sin_cache": rotary["cos_sin_cache"],
        "q_weight": q_weight if case.options["normed"] else None,
        "k_weight": k_weight.to(q.dtype) if case.options["normed"] else None,
        "eps": 1e-6,
        "interleaved": case.options["interleaved"],
        "q_scale": None,
        "key_scale": None,
        "value_scale": None,
        "sections": sections,
        "sections_interleaved": case.options.get("sections_interleaved", False),
    }


# The results' rounding to bfloat16, 2**-9.
_FUSED_RESULTS = [
    Tensor(f"new_{each.name}", each.dims, each.name, rtol=4e-3, atol=1e-5)
    for each in spec.QK_NORM_ROPE_CACHE.tensors
    if each.written
]

QK_NORM_ROPE_CACHE = Contract.of(
    "rotary",
    spec.QK_NORM_ROPE_CACHE.changed(
        results=_FUSED_RESULTS,
        arguments=tuple(
            replace(each, written=False) if isinstance(each, Tensor) else each
            for each in spec.QK_NORM_ROPE_CACHE.arguments
        ),
    ),
    cases=(
        _fused_case(1, (1, 1), 16, 16, "bfloat16"),
        _fused_case(33, (8, 2), 128, 128, "bfloat16"),
        _fused_case(20, (4, 3), 64, 32, "float16", "strided", interleaved=True),
        _fused_case(17, (6, 2), 80, 16, "bfloat16", normed=False),
        _fused_case(5, (2, 1), 20, 10, "float16"),
        _fused_case(0, (4, 2), 64, 64, "bfloat16"),
        _fused_case(9, (4, 2), 128, 128, "bfloat16", sections=(16, 24, 24)),
        _fused_case(
            *(9, (4, 2), 128, 128, "bfloat16"), sections=(24, 20, 20), sections_interleaved=True
        ),
    ),
    timing={
        "cpu": _fused_case(64, (8, 2), 128, 128, "bfloat16"),
        "cuda": _fused_case(4096, (32, 8), 128, 128, "bfloat16"),
    },
    make=_make_fused,
    mutates=("q_out", "key_cache", "value_cache"),
)


def _make_norm_rope(case: Case, device: str, seed: int) -> dict[str, Any]:
    made = _make_fused(replace(case, sizes=case.sizes | {"blocks": 1, "places": 1}), device, seed)
    return {each.name: made[each.name] for each in spec.QK_NORM_ROPE.arguments}


def _norm_rope_case(*sizes: Any, **options: bool) -> Case:
    case = _fused_case(*sizes, **options)
    kept = {name: case.sizes[name] for name in ("T", "H", "Hk", "D", "R", "P")}
    return replace(case, sizes=kept)


QK_NORM_ROPE = Contract.of(
    "rotary",
    spec.QK_NORM_ROPE,
    cases=(
        _norm_rope_case(1, (1, 1), 16, 16, "bfloat16"),
        _norm_rope_case(33, (8, 2), 128, 128, "bfloat16"),
        _norm_rope_case(20, (4, 3), 64, 32, "float16", "strided", interleaved=True),
        _norm_rope_case(17, (6, 2), 80, 16, "bfloat16", normed=False),
        _norm_rope_case(5, (2, 1), 20, 10, "float16"),
        _norm_rope_case(0, (4, 2), 64, 64, "bfloat16"),
    ),
    timing={
        "cpu": _norm_rope_case(64, (8, 2), 128, 128, "bfloat16"),
        "cuda": _norm_rope_case(4096, (32, 8), 128, 128, "bfloat16"),
    },
    make=_make_norm_rope,
)

CONTRACTS = (ROTARY_EMBEDDING, KV_CACHE_WRITE, QK_NORM_ROPE_CACHE, QK_NORM_ROPE)
