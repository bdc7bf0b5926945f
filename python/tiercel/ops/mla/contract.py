# SPDX-License-Identifier: Apache-2.0
"""Latent attention over a paged cache, and writes into it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiercel.core.spec import Bool, Tensor
from tiercel.ops.mla import spec
from tiercel.plugins.contract import Case, Contract

_LENGTHS = {"one": (1,), "ragged": (70, 0, 3, 1, 200), "even": (256,) * 8, "none": ()}
_SCALE = 192**-0.5
_COLUMNS = spec.LATENT + spec.ROTARY


def _case(
    lengths: str, queries: int, heads: int, page: int, dtype: str = "bfloat16", **options: Any
) -> Case:
    batch = len(_LENGTHS[lengths.removesuffix(" strided")])
    sizes = {"B": batch, "Sq": queries, "H": heads, "page_size": page}
    return Case(sizes, dtype, {"cache": "same"} | options, lengths)


def rows(drawn: Any, cache: str, dtype: Any) -> tuple[Any, Any]:
    """Drawn rows, ``[..., 576]``, in a cache's layout, and their scale."""
    import torch

    from tiercel.ops.mla.reference import mla_cache_write

    if cache == "same":
        return drawn.to(dtype), None
    packed = cache == "uint8"
    scale = None if packed else torch.tensor([0.5], device=drawn.device)
    width = spec.PACKED if packed else _COLUMNS
    stored = torch.zeros(*drawn.shape[:-1], width, dtype=getattr(torch, cache), device=drawn.device)
    flat = drawn.bfloat16().view(-1, _COLUMNS)
    slots = torch.arange(len(flat), device=drawn.device)
    parts = flat.split((spec.LATENT, spec.ROTARY), 1)
    return mla_cache_write(*parts, stored, slots, kv_scale=scale), scale


def _make_decode(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    lengths = _LENGTHS[case.values.removesuffix(" strided")]
    strided = case.values.endswith(" strided")
    batch, queries, heads, page = case.sizes.values()
    columns = -(-max(lengths, default=0) // page) + 1
    pages = batch * columns + 1
    dtype = getattr(torch, case.dtype)
    q = torch.randn(batch, queries, heads, _COLUMNS, generator=generator).to(dtype)
    drawn = torch.randn(pages, page, _COLUMNS, generator=generator)
    cache, scale = rows(drawn, case.options["cache"], dtype)
    table = torch.randperm(pages, generator=generator)[: batch * columns]
    tensors = {
        "q": torch.cat([q, -q], dim=1)[:, :queries] if strided else q,
        "kv_cache": cache,
        "page_table": table.view(batch, columns).int(),
        "seqused_k": torch.tensor(lengths, dtype=torch.int32),
        "kv_scale": scale,
    }
    placed = {name: x if x is None else x.to(device) for name, x in tensors.items()}
    if strided:
        for name in ("page_table", "seqused_k"):
            placed[name] = torch.stack([placed[name]] * 2, -1)[..., 0]
    given = {**placed, "scale": _SCALE, "d_v": spec.LATENT, "return_lse": True}
    return {name: given[name] for name in _BOTH.names}


# Backends always return both results.
_BOTH = spec.MLA_DECODE_LSE.changed(
    name="mla_decode", arguments=(*spec.MLA_DECODE_LSE.arguments, Bool("return_lse"))
)

MLA_DECODE = Contract.of(
    "mla",
    _BOTH,
    constants={"return_lse": True},
    cases=(
        _case("one", 1, 1, 16),
        _case("ragged", 1, 16, 64),
        _case("ragged", 3, 8, 1, "float16"),
        _case("ragged", 2, 40, 128),
        _case("ragged strided", 2, 16, 32),
        _case("ragged", 1, 16, 64, cache="float8_e4m3fn"),
        _case("ragged", 1, 16, 64, cache="uint8"),
        _case("none", 1, 16, 64),
    ),
    timing={
        "cpu": _case("even", 1, 16, 64),
        "cuda": _case("even", 1, 128, 64),
    },
    make=_make_decode,
)


def _write_case(
    tokens: int,
    blocks: int,
    places: int,
    dtype: str,
    cache: str = "same",
    values: str = "random",
    pairs: str = "none",
) -> Case:
    sizes = {"T": tokens, "blocks": blocks, "places": places}
    return Case(sizes, dtype, {"cache": cache, "pairs": pairs}, values)


def _make_write(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    tokens, blocks, places = case.sizes.values()
    dtype, cache = getattr(torch, case.dtype), case.options["cache"]
    drawn = torch.randn(tokens, _COLUMNS, generator=generator).to(dtype)
    latent, rotary = drawn.split((spec.LATENT, spec.ROTARY), 1)
    if case.values != "strided":
        latent, rotary = latent.contiguous(), rotary.contiguous()
    stored, scale = rows(torch.randn(blocks, places, _COLUMNS, generator=generator), cache, dtype)
    slots = torch.randperm(blocks * places, generator=generator)[:tokens]
    slots = torch.where(torch.rand(tokens, generator=generator) < 0.1, -1, slots)
    pairs, positions, table = case.options["pairs"], None, None
    if pairs != "none":
        positions = torch.randint(50, (tokens,), generator=generator)
        angles = torch.rand(50, spec.ROTARY // 2, generator=generator) * 6.0
        table = torch.cat([angles.cos(), angles.sin()], dim=1)
    given = {
        "latent": latent,
        "rotary": rotary,
        "kv_cache": stored,
        "slots": slots,
        "kv_scale": scale,
        "positions": positions,
        "cos_sin_cache": table,
    }
    placed = {name: x if x is None else x.to(device) for name, x in given.items()}
    return {**placed, "interleaved": pairs == "interleaved"}


# A backend returns a new cache, which the operator copies into the one that it writes to.
MLA_CACHE_WRITE = Contract.of(
    "mla",
    spec.MLA_CACHE_WRITE.changed(
        # The rounding of rotated keys to bfloat16, 2**-9.
        results=[Tensor("new_kv_cache", "blocks places W", "kv_cache", rtol=4e-3, atol=1e-5)],
        arguments=tuple(
            replace(each, written=False) if isinstance(each, Tensor) else each
            for each in spec.MLA_CACHE_WRITE.arguments
        ),
    ),
    cases=(
        _write_case(1, 2, 4, "bfloat16"),
        _write_case(33, 5, 16, "bfloat16"),
        _write_case(33, 40, 1, "float16"),
        _write_case(20, 2, 16, "bfloat16", values="strided"),
        _write_case(20, 2, 16, "float16", "float8_e4m3fn"),
        _write_case(20, 2, 16, "bfloat16", "uint8"),
        _write_case(20, 2, 16, "bfloat16", pairs="halves"),
        _write_case(20, 2, 16, "float16", pairs="interleaved"),
        _write_case(0, 2, 16, "bfloat16"),
    ),
    timing={
        "cpu": _write_case(64, 8, 64, "bfloat16"),
        "cuda": _write_case(4096, 128, 64, "bfloat16"),
    },
    make=_make_write,
    mutates=("kv_cache",),
)


def _sparse_case(
    queries: int, heads: int, entries: int, page: int, cache: str = "same", values: str = "random"
) -> Case:
    sizes = {"T": queries, "H": heads, "k": entries, "page_size": page}
    return Case(sizes, "bfloat16", {"cache": cache}, values)


def _make_sparse(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    queries, heads, entries, page = case.sizes.values()
    pages = 200 // page + 1
    dtype, strided = getattr(torch, case.dtype), case.values == "strided"
    q = torch.randn(queries, heads, _COLUMNS, generator=generator).to(dtype)
    drawn = torch.randn(pages, page, _COLUMNS, generator=generator)
    cache, scale = rows(drawn, case.options["cache"], dtype)
    # One of ten or so is none.
    indices = torch.randint(-20, pages * page, (queries, entries), generator=generator)
    tensors = {
        "q": torch.cat([q, -q], dim=1)[:, :heads] if strided else q,
        "kv_cache": cache,
        "indices": indices.clamp_min(-1).int(),
        "kv_scale": scale,
    }
    placed = {name: x if x is None else x.to(device) for name, x in tensors.items()}
    if strided:
        placed["indices"] = torch.stack([placed["indices"]] * 2, -1)[..., 0]
    given = {**placed, "scale": _SCALE, "d_v": spec.LATENT, "return_lse": True}
    return {name: given[name] for name in _SPARSE_BOTH.names}


_SPARSE_BOTH = spec.MLA_SPARSE_LSE.changed(
    name="mla_sparse_attention",
    arguments=(*spec.MLA_SPARSE_LSE.arguments, Bool("return_lse")),
)

MLA_SPARSE = Contract.of(
    "mla",
    _SPARSE_BOTH,
    constants={"return_lse": True},
    cases=(
        _sparse_case(1, 16, 130, 64),
        _sparse_case(3, 72, 300, 1),
        _sparse_case(3, 8, 64, 16, values="strided"),
        _sparse_case(2, 16, 100, 64, "float8_e4m3fn"),
        _sparse_case(2, 16, 100, 64, "uint8"),
        _sparse_case(2, 16, 0, 64),
        _sparse_case(0, 16, 64, 64),
    ),
    timing={
        "cpu": _sparse_case(2, 16, 128, 64),
        "cuda": _sparse_case(128, 128, 2048, 64),
    },
    make=_make_sparse,
)


def _top_k_case(tokens: int, columns: int, k: int, values: str = "random") -> Case:
    return Case({"T": tokens, "N": columns, "k": k}, "float32", {}, values)


def _make_top_k(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    tokens, columns, k = case.sizes.values()
    logits = torch.randn(tokens, columns, generator=generator)
    if case.values == "ties":
        logits = logits.mul(2).round()
    lengths = None
    if case.values == "ragged":
        lengths = torch.randint(columns + 1, (tokens,), generator=generator).int().to(device)
    logits = logits.to(device)
    if case.values == "strided":
        logits = torch.cat([logits, logits], 1)[:, 1 : columns + 1]
    return {"logits": logits, "k": k, "lengths": lengths}


TOP_K_INDICES = Contract.of(
    "mla",
    spec.TOP_K_INDICES,
    cases=(
        _top_k_case(1, 1, 1),
        _top_k_case(3, 1000, 64),
        _top_k_case(2, 9000, 2048, "ties"),
        _top_k_case(5, 300, 256, "ragged"),
        _top_k_case(3, 500, 20, "strided"),
        _top_k_case(2, 10, 16),
        _top_k_case(0, 10, 4),
    ),
    timing={
        "cpu": _top_k_case(4, 4096, 64),
        "cuda": _top_k_case(64, 65536, 2048),
    },
    make=_make_top_k,
)


def _indexer_case(tokens: int, heads: int, keys: int, values: str = "random") -> Case:
    return Case({"T": tokens, "H": heads, "K": keys}, "float8_e4m3fn", {}, values)


def _make_indexer(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    tokens, heads, keys = case.sizes.values()
    bounded, strided = case.values == "bounded", case.values == "strided"
    k = torch.randn(keys, 256, generator=generator).to(torch.float8_e4m3fn)[:, :128]
    ends = torch.randint(keys + 1, (tokens,), generator=generator).int()
    given = {
        "q": torch.randn(tokens, heads, 128, generator=generator).to(torch.float8_e4m3fn),
        "k": k if strided else k.contiguous(),
        "k_scale": torch.rand(keys, generator=generator) * 0.05,
        "weights": torch.randn(tokens, heads, generator=generator) * 0.1,
        "starts": ends // 3 if bounded else None,
        "ends": ends if bounded else None,
    }
    placed = {name: x if x is None else x.to(device) for name, x in given.items()}
    if strided:
        placed["k"] = placed["k"].repeat(1, 2)[:, :128]
    return placed


INDEXER_LOGITS = Contract.of(
    "mla",
    spec.INDEXER_LOGITS,
    cases=(
        _indexer_case(1, 64, 100),
        _indexer_case(9, 32, 300),
        _indexer_case(6, 64, 700, "bounded"),
        _indexer_case(3, 64, 64, "strided"),
        _indexer_case(0, 64, 100),
    ),
    timing={
        "cpu": _indexer_case(2, 32, 256),
        "cuda": _indexer_case(1024, 64, 32768),
    },
    make=_make_indexer,
)

CONTRACTS = (MLA_DECODE, MLA_SPARSE, MLA_CACHE_WRITE, INDEXER_LOGITS, TOP_K_INDICES)
