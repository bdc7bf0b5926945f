# SPDX-License-Identifier: Apache-2.0
"""Attention: of many queries, over paged keys, and two results merged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiercel.core.spec import HALVES, Bool, Spec
from tiercel.ops.attention import spec
from tiercel.plugins.contract import Case, Contract

_REST = {"window": None, "scale": None, "softcap": None, "return_lse": True}


def _case(
    batch: int,
    queries: int,
    keys: int,
    heads: tuple[int, int],
    d: int,
    dtype: str = "bfloat16",
    causal: bool = False,
    values: str = "random",
    d_v: int | None = None,
    **more: Any,
) -> Case:
    sizes = {"B": batch, "Sq": queries, "Sk": keys, "H": heads[0], "Hk": heads[1], "D": d}
    sizes["Dv"] = d_v or d
    return Case(sizes, dtype, {"causal": causal, **_REST, **more}, values)


_CASES = (
    _case(1, 128, 128, (2, 2), 128),
    _case(2, 300, 300, (4, 2), 64, "float16", True),
    _case(2, 65, 257, (4, 1), 128, "bfloat16", True),
    _case(1, 200, 100, (2, 2), 64, "bfloat16", True),
    _case(3, 1, 77, (2, 1), 128, "float16"),
    _case(0, 16, 16, (2, 2), 64),
    _case(2, 130, 130, (2, 2), 64, "bfloat16", True, "strided"),
    _case(2, 200, 200, (4, 2), 192, "bfloat16", True, d_v=128),
    _case(2, 70, 140, (4, 2), 64, "bfloat16", True, sinks=True),
)


_CONSTANTS = {"return_lse": True}


def _with_both_results(declared: Spec) -> Spec:
    """Backends always return both results, and take no float8 queries."""
    declared = declared.without(*spec.DESCALES)
    first = replace(declared.tensors[0], dtypes=HALVES)
    return declared.changed(arguments=(first, *declared.arguments[1:], Bool("return_lse")))


def _make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def random(length: str, heads: str, d: str = "D") -> Any:
        shape = [case.sizes[name] for name in ("B", length, heads, d)]
        drawn = torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
        if case.values != "strided":
            return drawn
        return torch.cat([drawn, -drawn], dim=2)[:, :, : shape[2]]

    tensors = {"q": random("Sq", "H"), "k": random("Sk", "Hk"), "v": random("Sk", "Hk", "Dv")}
    given = {**tensors, **case.options, "sinks": _sinks(case, device, generator)}
    return {name: given[name] for name in ATTENTION.names}


def _sinks(case: Case, device: str, generator: Any) -> Any:
    import torch

    if not case.options.get("sinks"):
        return None
    return torch.randn(case.sizes["H"], generator=generator).to(device)


def _apart(integers: Any) -> Any:
    """A copy with a stride of two, and other numbers between its elements."""
    import torch

    return torch.stack([integers, -integers - 1], dim=-1)[..., 0]


ATTENTION = Contract.of(
    "attention",
    _with_both_results(spec.ATTENTION_LSE),
    constants=_CONSTANTS,
    cases=_CASES,
    timing={
        "cpu": _case(1, 128, 128, (2, 2), 64),
        "cuda": _case(2, 2048, 2048, (16, 16), 128, "bfloat16", True),
    },
    make=_make,
)


def _varlen_case(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    heads: tuple[int, int],
    d: int,
    dtype: str = "bfloat16",
    causal: bool = False,
    strided: bool = False,
    d_v: int | None = None,
    **more: Any,
) -> Case:
    sizes = {"Tq": sum(queries), "Tk": sum(keys), "H": heads[0], "Hk": heads[1], "D": d}
    sizes["Dv"] = d_v or d
    lengths = f"{' '.join(map(str, queries))} of {' '.join(map(str, keys))}"
    lengths += " strided" if strided else ""
    options = {"causal": causal, **_REST, **more}
    return Case(sizes | {"B1": len(queries) + 1}, dtype, options, lengths)


_VARLEN_CASES = (
    _varlen_case((130, 5, 64), (130, 5, 64), (2, 2), 128),
    _varlen_case((100, 0, 300), (100, 7, 257), (4, 2), 64, "float16", True),
    _varlen_case((20,), (33,), (2, 1), 64),
    _varlen_case((0, 0), (5, 3), (2, 2), 64),
    _varlen_case((70, 200), (70, 200), (2, 2), 64, "bfloat16", True, True),
    _varlen_case((70, 200), (70, 200), (2, 2), 192, "bfloat16", True, d_v=128),
    _varlen_case((70, 0, 100), (140, 5, 100), (4, 2), 64, "bfloat16", True, sinks=True),
)


def _make_varlen(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def random(length: str, heads: str, d: str = "D") -> Any:
        shape = [case.sizes[name] for name in (length, heads, d)]
        drawn = torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
        return torch.cat([drawn, -drawn], dim=1)[:, : shape[1]] if strided else drawn

    strided = case.values.endswith(" strided")
    made = {"q": random("Tq", "H"), "k": random("Tk", "Hk"), "v": random("Tk", "Hk", "Dv")}
    spoken = case.values.removesuffix(" strided")
    lengths = [[int(n) for n in part.split()] for part in spoken.split(" of ")]
    for name, of_one in zip("qk", lengths, strict=True):
        starts = torch.tensor([0, *of_one]).cumsum(0).to(device=device, dtype=torch.int32)
        made[f"cu_seqlens_{name}"] = _apart(starts) if strided else starts
    longest = {"max_seqlen_q": max(lengths[0]), "max_seqlen_k": max(lengths[1])}
    sinks = _sinks(case, device, generator)
    given = {**made, **longest, **case.options, "sinks": sinks}
    return {name: given[name] for name in ATTENTION_VARLEN.names}


ATTENTION_VARLEN = Contract.of(
    "attention",
    _with_both_results(spec.ATTENTION_VARLEN_LSE),
    constants=_CONSTANTS,
    cases=_VARLEN_CASES,
    timing={
        "cpu": _varlen_case((64, 30), (64, 30), (2, 2), 64),
        "cuda": _varlen_case((2048, 1000, 500), (2048, 1000, 500), (16, 16), 128, causal=True),
    },
    make=_make_varlen,
)


_LENGTHS = {"ragged": (0, 1, 300, 16, 77), "one": (513,), "even": (256,) * 4, "none": ()}


def _decode_case(
    lengths: str,
    queries: int,
    heads: tuple[int, int],
    d: int,
    page: int,
    dtype: str = "bfloat16",
    **options: Any,
) -> Case:
    batch = len(_LENGTHS[lengths.removesuffix(" strided")])
    sizes = {"B": batch, "Sq": queries, "H": heads[0], "Hk": heads[1], "D": d, "page_size": page}
    return Case(sizes, dtype, options, lengths)


_DECODE_REST = {"causal": True, "window": None, "scale": None, "softcap": None}


def _make_decode(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    lengths = _LENGTHS[case.values.removesuffix(" strided")]
    batch, queries, heads, kv_heads, d, page = case.sizes.values()
    columns = -(-max(lengths, default=0) // page) + 1
    pages = batch * columns + 1
    dtype = getattr(torch, case.dtype)
    q = torch.randn(batch, queries, heads, d, generator=generator).to(device, dtype)
    if case.values.endswith(" strided"):
        q = torch.cat([q, -q], dim=1)[:, :queries]
    stored = torch.randn(pages, 2, page, kv_heads, d, generator=generator)
    options = dict(case.options)
    cache = getattr(torch, options.pop("cache", case.dtype))
    scales: dict[str, Any] = {"k_scale": None, "v_scale": None}
    if cache != dtype:
        scales = {name: (torch.rand(kv_heads, generator=generator) + 0.5) for name in scales}
    prefix = torch.randint(50, (batch,), generator=generator).int() if "left" in options else None
    left = options.pop("left", None)
    tensors = {
        "q": q,
        "k_cache": stored[:, 0].to(cache),
        "v_cache": stored[:, 1].to(cache),
        "page_table": torch.randperm(pages, generator=generator)[: batch * columns]
        .view(batch, columns)
        .int(),
        "seqused_k": torch.tensor(lengths, dtype=torch.int32),
        "prefix": prefix,
        **scales,
    }
    placed = {name: x if x is None else x.to(device) for name, x in tensors.items()}
    if case.values.endswith(" strided"):
        for name in ("page_table", "seqused_k", "prefix"):
            if placed[name] is not None:
                placed[name] = _apart(placed[name])
    window = None if left is None else (left, -1)
    rest = {**_DECODE_REST, "window": window, **options}
    return {**placed, **rest, "max_seqused_k": None, "return_lse": True}


DECODE_ATTENTION = Contract.of(
    "attention",
    _with_both_results(spec.DECODE_ATTENTION_LSE),
    constants=_CONSTANTS,
    cases=(
        _decode_case("one", 1, (1, 1), 64, 16),
        _decode_case("ragged", 1, (8, 2), 128, 16),
        _decode_case("ragged", 3, (8, 2), 64, 1, "float16"),
        _decode_case("ragged", 2, (4, 4), 128, 64, softcap=5.0),
        _decode_case("ragged strided", 2, (8, 1), 128, 16, left=30),
        _decode_case("ragged", 1, (8, 2), 128, 32, cache="float8_e4m3fn"),
        _decode_case("none", 1, (8, 2), 64, 16),
    ),
    timing={
        "cpu": _decode_case("even", 1, (8, 2), 64, 16),
        "cuda": _decode_case("even", 1, (32, 8), 128, 16),
    },
    make=_make_decode,
)


def _paged_case(
    lengths: str,
    heads: tuple[int, int],
    d: int,
    page: int,
    dtype: str = "bfloat16",
    d_v: int | None = None,
    **options: Any,
) -> Case:
    sizes = {"H": heads[0], "Hk": heads[1], "D": d, "Dv": d_v or d, "page_size": page}
    sizes["B"] = len(_NEW[lengths.removesuffix(" strided")])
    return Case(sizes, dtype, options, lengths)


# New tokens and keys of each sequence.
_NEW = {
    "mixed": ((0, 7), (1, 77), (130, 300), (3, 3), (1, 0)),
    "one": ((64, 513),),
    "even": ((1, 256), (1, 256), (64, 256)),
    "trees": ((1, 7), (7, 77), (20, 20)),
    "none": (),
}


def _trees(lengths: Any, generator: Any) -> Any:
    """A tree_mask: a random tree for the new tokens of each sequence."""
    import torch

    words = []
    for new, _ in lengths:
        of_tree: list[int] = []
        for i in range(new):
            parent = int(torch.randint(-1, i, (), generator=generator)) if i else -1
            of_tree.append(1 << i | (of_tree[parent] if parent >= 0 else 0))
        words += of_tree
    return torch.tensor(words, dtype=torch.int64)


def _make_paged(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    strided = case.values.endswith(" strided")
    lengths = _NEW[case.values.removesuffix(" strided")]
    heads, kv_heads, d, d_v, page, _ = case.sizes.values()
    columns = -(-max((keys for _, keys in lengths), default=0) // page) + 1
    pages = len(lengths) * columns + 1
    dtype = getattr(torch, case.dtype)
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).int()
    q = torch.randn(int(starts[-1]), heads, d, generator=generator).to(dtype)
    stored = torch.randn(pages, 2, page, kv_heads, max(d, d_v), generator=generator)
    options = dict(case.options)
    cache = getattr(torch, options.pop("cache", case.dtype))
    scales: dict[str, Any] = {"k_scale": None, "v_scale": None}
    if cache != dtype:
        scales = {name: (torch.rand(kv_heads, generator=generator) + 0.5) for name in scales}
    sinks = torch.randn(heads, generator=generator) if options.pop("sinks", False) else None
    left = options.pop("left", None)
    prefix = torch.tensor([2 * keys // 3 for _, keys in lengths], dtype=torch.int32)
    table = torch.randperm(pages, generator=generator)[: len(lengths) * columns]
    tensors = {
        "q": torch.cat([q, -q], dim=1)[:, :heads] if strided else q,
        "k_cache": stored[:, 0, ..., :d].to(cache),
        "v_cache": stored[:, 1, ..., :d_v].to(cache),
        "page_table": table.view(len(lengths), columns).int(),
        "seqused_k": torch.tensor([keys for _, keys in lengths], dtype=torch.int32),
        "cu_seqlens_q": starts,
        "sinks": sinks,
        "tree_mask": _trees(lengths, generator) if case.values == "trees" else None,
        "prefix": prefix if options.pop("prefix", False) else None,
        **scales,
    }
    placed = {name: x if x is None else x.to(device) for name, x in tensors.items()}
    if strided:
        for name in ("page_table", "seqused_k", "cu_seqlens_q"):
            placed[name] = _apart(placed[name])
    longest = max((new for new, _ in lengths), default=0)
    window = None if left is None else (left, -1)
    rest = {"max_seqlen_q": longest, **_DECODE_REST, "window": window, **options}
    given = {**placed, **rest, "max_seqused_k": None, "return_lse": True}
    return {name: given[name] for name in PAGED_ATTENTION.names} | given


PAGED_ATTENTION = Contract.of(
    "attention",
    _with_both_results(spec.PAGED_ATTENTION_LSE).without("q_scale"),
    constants=_CONSTANTS,
    cases=(
        _paged_case("one", (1, 1), 64, 16),
        _paged_case("mixed", (8, 2), 128, 16),
        _paged_case("mixed", (8, 2), 64, 1, "float16", sinks=True),
        _paged_case("mixed", (4, 4), 128, 64, softcap=5.0),
        _paged_case("mixed strided", (8, 1), 128, 16, left=30),
        _paged_case("mixed", (8, 2), 128, 32, cache="float8_e4m3fn"),
        _paged_case("mixed", (8, 2), 64, 16, prefix=True),
        _paged_case("mixed", (4, 2), 192, 16, d_v=128),
        _paged_case("trees", (8, 2), 128, 16),
        _paged_case("none", (8, 2), 64, 16),
    ),
    timing={
        "cpu": _paged_case("even", (8, 2), 64, 16),
        "cuda": _paged_case("even", (32, 8), 128, 16),
    },
    make=_make_paged,
)


def _make_states(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    batch, length, heads, d = case.sizes.values()
    tensors = {}
    for name in "ab":
        out = torch.randn(batch, length, heads, d, generator=generator)
        out = out.to(device=device, dtype=getattr(torch, case.dtype))
        if case.values == "strided":
            out = torch.cat([out, -out], dim=1)[:, :length]
        lse = torch.randn(batch, heads, length, generator=generator) * 3
        lse[torch.rand(lse.shape, generator=generator) < 0.1] = -torch.inf
        tensors[f"out_{name}"] = out
        tensors[f"lse_{name}"] = lse.to(device)
    return tensors


def _states(dtype: str, *sizes: int, values: str = "random") -> Case:
    return Case(dict(zip(("B", "S", "H", "D"), sizes, strict=True)), dtype, values=values)


MERGE_ATTENTION_STATES = Contract.of(
    "attention",
    spec.MERGE_ATTENTION_STATES,
    cases=(
        _states("float32", 1, 1, 1, 16),
        _states("bfloat16", 3, 5, 7, 128),
        _states("float16", 2, 33, 4, 64, values="strided"),
        _states("float32", 2, 3, 4, 10),
        _states("bfloat16", 0, 5, 4, 64),
    ),
    timing={
        "cpu": _states("bfloat16", 8, 16, 8, 128),
        "cuda": _states("bfloat16", 64, 16, 32, 128),
    },
    make=_make_states,
)

CONTRACTS = (
    ATTENTION,
    ATTENTION_VARLEN,
    DECODE_ATTENTION,
    PAGED_ATTENTION,
    MERGE_ATTENTION_STATES,
)

# Names in tiercel.plugins.types.
ALIASES = {
    "Queries": "attention.q",
    "Keys": "attention.k",
    "Values": "attention.v",
    "Attended": "attention.out",
    "LogSums": "attention.lse",
    "Sinks": "attention.sinks",
    "PackedQueries": "attention_varlen.q",
    "PackedKeys": "attention_varlen.k",
    "PackedValues": "attention_varlen.v",
    "PackedAttended": "attention_varlen.out",
    "PackedLogSums": "attention_varlen.lse",
}
