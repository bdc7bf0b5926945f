# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding, and new keys and values into a paged cache."""

from __future__ import annotations

from typing import Any

from tiercel.plugins.contract import Case, Contract, ScalarSpec, TensorSpec


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
    sizes = {"T": tokens, "H": heads, "G": kv_heads, "D": size, "R": rotated, "P": 64}
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

    tokens, heads, kv_heads, size, rotated, rows = (case.sizes[name] for name in "THGDRP")
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


def _into(call: Any, *values: Any) -> None:
    *inputs, q_out, k_out, interleaved = values
    for out, result in zip((q_out, k_out), call(*inputs, interleaved), strict=True):
        out.copy_(result)


def _in_place(call: Any, positions: Any, q: Any, k: Any, cache: Any, interleaved: bool) -> None:
    _into(call, positions, q, k, cache, q, k, interleaved)


_DTYPES = ("float32", "bfloat16", "float16")

ROTARY_EMBEDDING = Contract(
    family="rotary",
    op="rotary_embedding",
    arguments=(
        TensorSpec("positions", ("T",), ("int32", "int64")),
        TensorSpec("q", ("T", "H", "D"), _DTYPES, strided=True),
        TensorSpec("k", ("T", "G", "D"), ("q",), strided=True),
        TensorSpec("cos_sin_cache", ("P", "R"), _DTYPES),
        ScalarSpec("interleaved", "bool"),
    ),
    # The results' rounding to bfloat16, 2**-9.
    outputs=(
        TensorSpec("q_out", ("T", "H", "D"), ("q",), rtol=4e-3, atol=1e-5),
        TensorSpec("k_out", ("T", "G", "D"), ("q",), rtol=4e-3, atol=1e-5),
    ),
    cases=_CASES,
    timing={
        "cpu": _case(256, 8, 2, 128, 128, "bfloat16"),
        "cuda": _case(4096, 32, 8, 128, 128, "bfloat16"),
    },
    make=_make,
    variants={
        "rotary_embedding": lambda call, *values: call(*values),
        "rotary_embedding_out": _into,
        "rotary_embedding_": _in_place,
    },
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


def _into_caches(call: Any, *values: Any) -> None:
    caches = values[2:4]
    for cache, result in zip(caches, call(*values), strict=True):
        cache.copy_(result)


_CACHE = ("blocks", "places", "H", "D")
_CACHES = ("bfloat16", "float16", "float8_e4m3fn")

KV_CACHE_WRITE = Contract(
    family="rotary",
    op="kv_cache_write",
    arguments=(
        TensorSpec("key", ("T", "H", "D"), ("bfloat16", "float16"), strided=True),
        TensorSpec("value", ("T", "H", "D"), ("key",), strided=True),
        TensorSpec("key_cache", _CACHE, _CACHES, strided=True),
        TensorSpec("value_cache", _CACHE, ("key_cache",), strided=True),
        TensorSpec("slots", ("T",), ("int32", "int64")),
        TensorSpec("key_scale", ("scales",), ("float32",), optional=True),
        TensorSpec("value_scale", ("scales",), ("float32",), optional=True),
    ),
    outputs=(
        TensorSpec("new_key_cache", _CACHE, ("key_cache",)),
        TensorSpec("new_value_cache", _CACHE, ("key_cache",)),
    ),
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
    variants={"kv_cache_write": _into_caches},
    mutates=("key_cache", "value_cache"),
)

CONTRACTS = (ROTARY_EMBEDDING, KV_CACHE_WRITE)
